"""What is said to annotators, people and judges alike, before the groups."""

from __future__ import annotations

from typing import Any

from npeff.study.kit import Sample

_LISTED = 20
"""Answers of a task that are all listed; of more than these a few are."""

ABOUT = {
    "sst2": "The texts are sentences and phrases from film reviews. The task they belong to is to say whether a "
    "reviewer's opinion is negative or positive.",
    "reviews": "The texts are snippets of film reviews. The task they belong to is to say whether a reviewer's opinion "
    "is negative or positive.",
    "yat": "The texts are questions that people put on Yahoo Answers. The task they belong to is to say which of ten "
    "topics a question is about: {labels}.",
    "clinc150": "The texts are things that people say to a digital assistant. The task they belong to is to say which "
    "of {count} intents a text has, such as {labels}.",
    "triviaqa": "The texts are questions of the trivia collection TriviaQA. The task they belong to is to answer them; "
    "the answers are not shown here.",
}
"""What the texts of the built-in tasks are."""

SAMPLES = (
    Sample(
        (
            "How do I free a zip that is stuck halfway?",
            "My kettle switches itself off too early, what can I do?",
            "Can a cracked phone screen be repaired at home?",
            "the back wheel of my bike rubs on the frame, how is it straightened",
            "What glue holds the sole of a walking boot?",
        ),
        "yes",
        "How to mend things that are broken.",
    ),
    Sample(
        (
            "Which river runs through Vienna?",
            "The soup was cold and nobody came to take our order.",
            "please move my dentist's appointment to friday",
            "She trained for two years before her first marathon.",
            "How many strings does a cello have?",
        ),
        "no",
        "",
    ),
)
"""Worked samples for a kit whose maker gives none of its own; invented, so they give nothing of the run away."""


def about_task(task: dict[str, Any]) -> str:
    """What the texts of a run are; `task` is the manifest's."""
    labels = list(task["labels"])
    listed = ", ".join(labels if len(labels) <= _LISTED else labels[:3])
    if task["name"] in ABOUT:
        return ABOUT[task["name"]].replace("{labels}", listed).replace("{count}", str(len(labels)))
    prompt = " ".join(task["prompt"].replace("{text}", "[text]").split())
    said = f"The texts belong to the task “{task['name']}”. A language model sees each of them as: {prompt}"
    if not labels:
        return said
    if len(labels) > _LISTED:
        return f"{said} It chooses one of {len(labels)} answers, such as {listed}."
    return f"{said} It chooses one of these answers: {listed}."


def preamble(about: str, size: int) -> tuple[str, ...]:
    """All paragraphs before the samples."""
    return (
        f"You will see texts in groups of {size}. {about}",
        "For each group, please decide whether there is a theme that its texts have in common: yes, maybe or no. If "
        "you choose yes or maybe, describe the theme in a few words. Judge every group by itself.",
        "Two groups with their answers come first, as samples.",
    )
