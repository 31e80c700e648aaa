"""A version's model card: what it is, how it was made and how well it did. Facts only, the same at every call."""

from __future__ import annotations

from shared.registry import AdapterManifest

CARD = "README.md"


def _share(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1%}"


def _cell(text: str) -> str:
    """`text` where a bar or a line's end would end the cell."""
    return " ".join(text.split()).replace("|", "\\|")


def _origin(manifest: AdapterManifest) -> str:
    """How a cohort's version came to be; empty for one that one device trained."""
    origin = manifest.cohort
    if origin is None:
        return ""
    said = f"round {origin.round} of cohort {origin.cohort}: {origin.updates} devices' updates"
    said += f", {origin.algorithm.name}, {origin.aggregator.name}, server optimizer {origin.optimizer.name}"
    return said if origin.epsilon is None else f"{said}, epsilon {origin.epsilon:.3g}"


def model_card(manifest: AdapterManifest) -> bytes:
    """README.md of a PEFT directory."""
    recipe, result, training = manifest.recipe, manifest.result, manifest.training
    eps = training.eps_for(recipe)
    layers = recipe.layers if isinstance(recipe.layers, str) else ", ".join(map(str, recipe.layers))
    parent = manifest.parent
    rows = (
        ("base model", f"{recipe.base.name} (sha256 {recipe.base.sha256})"),
        ("adapter", f"{manifest.adapter}, version {manifest.version}"),
        ("made", manifest.created_at.strftime("%Y-%m-%d %H:%M UTC")),
        ("trained from", "B = 0" if parent is None else f"{parent.adapter}, version {parent.version}"),
        ("its revision", "" if parent is None else parent.revision),
        ("method", f"MobiZO: zeroth-order LoRA-FA, q = {recipe.queries}, E = {recipe.effective_batch}"),
        ("LoRA", f"rank {recipe.rank}, alpha {recipe.alpha:g}, on {', '.join(recipe.targets)}; A frozen"),
        ("adapted layers", layers),
        ("trained on", f"frozen weights in {recipe.precision}; estimator {recipe.estimator}, {recipe.noise} noise"),
        ("training", f"{result.steps} steps, lr {training.lr:g} ({training.schedule}), eps {eps:g}"),
        ("taken after step", str(result.best_step)),
        ("task", manifest.task.name),
        ("loss", recipe.loss),
        ("training examples", "private" if result.train_examples is None else str(result.train_examples)),
        ("test accuracy before", _share(result.before_accuracy)),
        ("test accuracy after", _share(result.tuned_accuracy)),
        ("made by", _origin(manifest)),
        ("job", manifest.job_id or ""),
        ("recipe", manifest.recipe_id),
        ("frozen A sha256", manifest.a_sha256),
        ("LoRA-B sha256", manifest.sha256),
    )
    where = "the device that holds" if manifest.cohort is None else "the devices that hold"
    table = "\n".join(f"| {name} | {_cell(value)} |" for name, value in rows if value)
    text = (
        "---\nlibrary_name: peft\ntags:\n- lora\n- mobizo\n---\n\n"
        f"# {manifest.adapter}\n\n"
        f"A LoRA adapter that was trained with forward passes only, on {where} the data. The data did\n"
        "not leave the device.\n\n"
        f"| | |\n|---|---|\n{table}\n\n"
        "Load it with PEFT onto the base model named above:\n\n"
        "```python\nfrom peft import PeftModel\n\nmodel = PeftModel.from_pretrained(base_model, directory)\n```\n"
    )
    return text.encode()
