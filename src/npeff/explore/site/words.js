// What the words on the pages mean: a "?" beside a figure opens its meaning, and #/words lists them all.
"use strict";

const WORDS = {
  "prediction-tuned": "All top examples of the component have the same prediction.",
  "label-tuned": "All top examples of the component have the same label.",
  "LnP-tuned": "Label, not prediction: all top examples have the same label but not the same prediction. The component follows the label also where the model is wrong.",
  "by chance": "The percentage that would be tuned if top examples were drawn at random.",
  explained: "How much of an example's Fisher the components describe together: 1 − residual, on average over the examples.",
  energy: "The component's part of the squared coefficients of all components: how much the decomposition uses it.",
  density: "How many of the examples have a coefficient that is not zero.",
  "label purity": "How many of the top examples have their most frequent label.",
  "prediction purity": "How many of the top examples have their most frequent prediction.",
  recurrence: "How many other fits, from other seeds and of halves of the examples, have a component with half or more of this one's squared length. What does not recur may be an accident of one fit.",
  group: "Components to which the same examples respond, more than chance allows: they may be one mechanism in several parts. Found from coefficients alone; groups lie in larger ones.",
  stability: "Mean similarity of the component's coefficients with those of its match in other seeds of the same method and number of components. 1: found again exactly.",
  coefficient: "How strongly the example uses the component. Compare coefficients of one component; they have no unit.",
  share: "How much of an example the component explains, counting its overlap with the other components. The shares of an example and what is left over add up to 100%.",
  "left over": "How much of the example no component explains: the residual.",
  similarity: "|cos|: 1 if two lists of numbers are the same up to a factor, 0 if they have nothing in common.",
  "similarity of coefficients": "Whether two components are used by the same examples: |cos| of their coefficients over all examples.",
  "similarity of vectors": "Whether two components are the same direction: |cos| of the components themselves. Only where both live in the same space.",
  correlation: "Pearson correlation of the coefficients of two components over the examples.",
  "KL ratio": "The model is changed along the component. Mean change (KL divergence) of the predictions of its top examples, divided by that of random examples. 1: the change is nothing special to them. Only the ratio on held-out examples says something about new ones.",
  "held-out": "The examples that are measured took no part in the fit, the direction, or the choice of ridge, sign and length. Those of them with the largest coefficients are the component's top examples.",
  "in-sample": "The examples that are measured also made the component and the direction. Such a ratio is larger than that of new examples: most of it may be memory of these very examples.",
  "95% interval": "Where the ratio lies with 95%, by bootstrap: the measured examples (for a mean also the components) are drawn again and again with replacement.",
  "random groups": "The same steps with as many random examples in place of the component's: what chance gives. Where 95% of such ratios lie, if their logarithms are normal; few groups make it wide.",
  "permuted coefficients": "The ratio when it is drawn at random which of the measured examples are the top ones: where 95% of these ratios lie, and the share p of them that are at least as large as the measured one.",
  "above chance": "Whether the ratio is above what chance gives: above the interval of random groups and that of permuted coefficients, whichever ends higher. If it is not, there is no effect above chance, however large the ratio looks.",
  "damage elsewhere": "What the same change does to text that has nothing to do with the task: mean KL divergence of the next-token predictions, a token of running text or at the end of another task's prompts; beside it, how much that is of the KL of the top examples.",
  "fit, tune, test": "Fit: examples that components and directions are made of. Tune: examples that ridge, sign and length are chosen on. Test: examples that the effect is measured on, once. In-sample results measure examples that were also fitted.",
  "predicted to second order": "The KL ratio that the gradients alone predict for a very small change. Far from the measured ratio: the change was large enough for the model to curve.",
  "KL of top examples": "Mean KL divergence between the predictions before and after the change, over the component's top examples.",
  "KL of the next in rank": "The same for the examples that follow the top ones in the ranking. Near the KL of the top: the component reaches further than the top list.",
  "KL of random examples": "The same for examples drawn at random.",
  flipped: "Examples whose most likely answer is another one after the change.",
  accuracy: "Predictions that equal the label, before → after the change.",
  "norm ratio": "How much more sensitive the top examples are to any change of the model: mean Fisher norm of the top over that of random examples. A KL ratio well above it is due to the direction.",
  "length of the change": "Euclidean length of what was added to the parameters.",
  sign: "A direction can be walked both ways: + adds it to the parameters, − subtracts it. The component does not say which way is meant, so both are tried on the tune part, and the one with the larger ratio is measured.",
  fidelity: "How well the vector that was added is the component: cosine of its sketch with the component. 1: exactly.",
  "words of its examples": "Words and pairs of words that the examples with the largest coefficients have and others have not, by log-odds. Found in fitted examples and checked on held-out ones: how many of both kinds these words tell apart.",
  "argues for": "What a small step along the component does to the log-probabilities of the answers, from the gradients. A component has no sign of its own: + is the way in which its examples' own predictions become likelier on average.",
  "agreement of examples": "Length of the mean change of the answers ÷ mean length of the changes. 100%: the step moves the answers of all examples in the same way. 0%: it moves some one way and others the other way.",
  "carrying words": "How much of the component's coefficient is lost without the word: the text without it is run through the model. Striped: the coefficient grows without it. Underlined: a pair that carries more than its words one at a time.",
  "heads and neurons": "Where the direction is: part of its squared length in the parameters of each attention head (columns) and layer (rows). Beside it, how much more that is than in directions that random groups of examples share.",
  keep: "Heads and neurons with the most energy are kept, all else is left out; the effect is half the variance of the change of logits. Much kept by few parts: they carry the component.",
  trace: "Size of the change of the residual stream behind each layer, at each token, ÷ the stream's own size; the largest is 100%.",
  "case study": "Top examples and held-out ones as they are, and with their carrying words removed or replaced by a word that has nothing to do with the component, collected and fitted anew.",
  direction: "plain: along the component. reject: without what other components have in common with it. whiten: the direction with the least effect on other examples.",
  "found again": "For each component the most similar one of the other decomposition, and the mean of these similarities.",
  "splits that keep their prediction": "With more components one may split into several. How many of those that come from a prediction-tuned component are tuned to the same prediction.",
  loss: "What the decomposition does not explain, per example, after each pass over the data.",
};

// The "?" of a word; its text comes from the style sheet, so that it is in no title and no file.
function what(word) {
  return el("button", { type: "button", class: "what", title: WORDS[word], "aria-label": `What does this mean: ${word}?`, onclick: (event) => explain(word, event.currentTarget) });
}
const worded = (word, title = word) => [title, " ", what(word)];

function explain(word, from) {
  const close = () => { $("meaning").replaceChildren(); if (from.isConnected) from.focus(); };
  $("meaning").replaceChildren(el("div", { onkeydown: (event) => { if (event.key === "Escape") close(); } },
    el("b", {}, word), ` ${WORDS[word]} `, el("a", { href: "#/words" }, "All words"),
    el("button", { type: "button", "aria-label": "Close", onclick: close }, "×")));
  $("meaning").querySelector("button").focus({ preventScroll: true });
}

route("words", () => [el("h1", {}, "Words"), el("p", {}, "A component is a direction in the model's parameters that the Fishers of many examples share. ", el("a", { href: home(), rel: "up" }, "All components")),
  el("dl", { id: "words" }, Object.entries(WORDS).map(([word, meaning]) => [el("dt", {}, word), el("dd", {}, meaning)]))]);
