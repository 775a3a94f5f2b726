// `npeff explore` gives out another file in place of this one: there somebody takes themes and tries texts.
"use strict";

const SERVED = false;
