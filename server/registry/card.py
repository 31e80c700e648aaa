"""A version's model card: its properties, training and scores. The same version always yields the same text."""

from __future__ import annotations

import json

from shared.recipe import REVERSE_ESTIMATORS, Recipe
from shared.registry import AdapterManifest
from shared.result import Result
from shared.task import Task, record_fields
from shared.task_records import read_question

CARD = "README.md"


def _method(recipe: Recipe) -> str:
    """Returns the training method as text."""
    if recipe.estimator == "gradient":
        return f"exact gradients of LoRA-FA's B, {recipe.optimizer}, E = {recipe.effective_batch}"
    if recipe.estimator == "directional":
        return (
            f"exact gradients of LoRA-FA's B, {recipe.optimizer if recipe.keeps_optimizer else 'sgd'}, projected on "
            f"q = {recipe.queries} random directions, E = {recipe.effective_batch}"
        )
    return f"MobiZO: zeroth-order LoRA-FA, q = {recipe.queries}, E = {recipe.effective_batch}"


def _share(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1%}"


def _cell(text: str) -> str:
    """Returns `text` escaped for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def _origin(manifest: AdapterManifest) -> str:
    """Returns the origin of a cohort's version as text; empty for a version of one device."""
    origin = manifest.cohort
    if origin is None:
        return ""
    text = f"round {origin.round} of cohort {origin.cohort}: {origin.updates} devices' updates"
    text += f", {origin.algorithm.name}, {origin.aggregator.name}, server optimizer {origin.optimizer.name}"
    return text if origin.epsilon is None else f"{text}, epsilon {origin.epsilon:.3g}"


def _scores(result: Result) -> tuple[tuple[str, str], ...]:
    """Returns the rows of the scores before and after: accuracies, or perplexities of a task that writes text."""
    split = result.accuracy_split or "test"
    selection_note = ", on the examples by which the adapter was chosen" if split == "validation" else ""
    perplexities = result.perplexities
    if perplexities is not None:
        name, before, after = "perplexity of answer tokens", f"{perplexities[0]:.2f}", f"{perplexities[1]:.2f}"
    else:
        name, before, after = "accuracy", _share(result.before_accuracy), _share(result.tuned_accuracy)
    if result.preference_margin is not None:
        name, before = "share of preferred answers that gained on the others", "half by chance"
        after += f", by {result.preference_margin:.2f} nats on average"
    rows = [(f"{split} {name} before", before), (f"{split} {name} after", after + selection_note)]
    if result.accuracy_interval is not None:
        total, low, high = result.accuracy_interval
        rows.append(("95 % interval after (Wilson)", f"{low:.1%} to {high:.1%}, {total} examples"))
    for baseline, accuracy in (
        ("most frequent answer", result.majority_accuracy),
        ("n-grams", result.baseline_accuracy),
    ):
        if accuracy is not None:
            rows.append((f"{split} accuracy of the baseline: {baseline}", f"{accuracy:.1%}"))
    if result.earlier_accuracy_before is not None:
        before, after = _share(result.earlier_accuracy_before), _share(result.earlier_accuracy_after)
        rows.append(("accuracy on held-out records of earlier jobs", f"{before} before, {after} after"))
    if result.reference_loss_change is not None:
        rows.append(("loss of the reference texts", f"{result.reference_loss_change:+.1%}"))
    for when, scores in (("before", result.written_before), ("after", result.written_after)):
        if scores is not None:
            text = f"exact match {scores.exact_match:.1%}, token F1 {scores.token_f1:.1%}, ROUGE-L {scores.rouge_l:.1%}"
            rows.append((f"{scores.examples} held-out texts {when}", text))
    return tuple(rows)


_USE = """import torch
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({base})
candidates = {candidates}
scores = {{}}
for label, (prompt, answer) in candidates.items():
    start = len(tokenizer(prompt).input_ids)
    tokens = tokenizer(prompt + answer, return_tensors="pt").input_ids
    with torch.no_grad():
        log_probabilities = model(tokens).logits[0, start - 1 : -1].log_softmax(-1)
    scores[label] = float(log_probabilities.gather(1, tokens[0, start:, None]).sum())
print(max(scores, key=scores.get))
"""


def _prompt(manifest: AdapterManifest, hub_id: str | None) -> str:
    """Returns the section with the prompt that the adapter was trained with, and how it is used."""
    task = manifest.task
    # As JSON, no text of a task can end its block.
    template = json.dumps(task.model_dump(mode="json", exclude_defaults=True), indent=2, ensure_ascii=False)
    section = (
        "\n## Prompt\n\nThe adapter was trained with the prompts of this task. Braces contain names of a record's "
        f"fields.\n\n```json\n{template}\n```\n"
    )
    if task.generates:
        return section
    fields = _example(task)
    body = json.dumps({"fields": fields}, ensure_ascii=False)
    question = read_question(task, fields | {task.label_field: task.answers[0].labels[0]}, task.name)
    candidates = {
        answer.labels[0]: (choice.prompt, choice.answer)
        for answer, choice in zip(task.answers, question.choices, strict=True)
    }
    use = _USE.format(base=repr(hub_id or "directory of the base model"), candidates=candidates)
    return (
        f"{section}\n"
        "mobizo's server, and `mobizo-agent serve` on a device, make the prompt and return the labels with their\n"
        f"probabilities. `POST /v1/adapters/{manifest.adapter}/classify` takes the fields:\n\n"
        f"```json\n{body}\n```\n\nWith `model` as loaded above:\n\n```python\n{use}```\n"
    )


def _example(task: Task) -> dict[str, str]:
    """Returns a record without a label; most values are the names of their fields."""
    fields = {field: f"<{field}>" for field in record_fields(task)}
    return fields | {each.field: next(iter(each.values)) for each in task.mapped.values()}


def model_card(manifest: AdapterManifest, hub_id: str | None = None) -> bytes:
    """Returns README.md of a PEFT directory. hub_id: the base model's id on the Hugging Face Hub, if it is known."""
    recipe, result, training = manifest.recipe, manifest.result, manifest.training
    exact = recipe.estimator in REVERSE_ESTIMATORS
    noise = "" if recipe.estimator == "gradient" else f", {recipe.noise} noise"
    eps = "" if exact else f", eps {training.eps_for(recipe):g}"
    layers = recipe.layers if isinstance(recipe.layers, str) else ", ".join(map(str, recipe.layers))
    parent = manifest.parent
    how = "exact gradients" if exact else "forward passes only"
    rows = (
        ("base model", f"{recipe.base.name} (sha256 {recipe.base.sha256})"),
        ("adapter", f"{manifest.adapter}, version {manifest.version}"),
        ("made", manifest.created_at.strftime("%Y-%m-%d %H:%M UTC")),
        ("trained from", "B = 0" if parent is None else f"{parent.adapter}, version {parent.version}"),
        ("its revision", "" if parent is None else parent.revision),
        ("method", _method(recipe)),
        ("LoRA", f"rank {recipe.rank}, alpha {recipe.alpha:g}, on {', '.join(recipe.targets)}; A frozen"),
        ("adapted layers", layers),
        ("trained on", f"frozen weights in {recipe.precision}; estimator {recipe.estimator}{noise}"),
        ("training", f"{result.steps} steps, lr {training.lr:g} ({training.schedule}){eps}"),
        ("taken after step", str(result.best_step)),
        ("task", manifest.task.name),
        ("loss", recipe.loss),
        ("training examples", "private" if result.train_examples is None else str(result.train_examples)),
        *_scores(result),
        ("made by", _origin(manifest)),
        ("job", manifest.job_id or ""),
        ("recipe", manifest.recipe_id),
        ("frozen A sha256", manifest.a_sha256),
        ("LoRA-B sha256", manifest.sha256),
    )
    where = "the device that holds" if manifest.cohort is None else "the devices that hold"
    table = "\n".join(f"| {name} | {_cell(value)} |" for name, value in rows if value)
    header, usage = "", "from peft import PeftModel\n\nmodel = PeftModel.from_pretrained(base_model, directory)"
    if hub_id is not None:
        header = f"base_model: {hub_id}\n"
        usage = (
            "from peft import AutoPeftModelForCausalLM\n\nmodel = AutoPeftModelForCausalLM.from_pretrained(directory)"
        )
    text = (
        f"---\nlibrary_name: peft\n{header}tags:\n- lora\n- mobizo\n---\n\n"
        f"# {manifest.adapter}\n\n"
        f"A LoRA adapter that was trained with {how}, on {where} the data. The data did\n"
        "not leave the device.\n\n"
        f"| | |\n|---|---|\n{table}\n\n"
        f"Load it with PEFT:\n\n```python\n{usage}\n```\n{_prompt(manifest, hub_id)}"
    )
    return text.encode()
