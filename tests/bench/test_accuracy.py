"""The contenders of `bench accuracy` on a random model, and its command."""

import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from shared.recipe import BaseRef, Recipe
from shared.task import read_question
from shared.zo.encoding import load_examples, pack_step, read_jsonl
from shared.zo.lora import BaseShape, init_a, lora_modules
from shared.zo.noise import query_seeds

with warnings.catch_warnings():  # the compiler's libraries warn of their own deprecations as they are imported
    warnings.simplefilter("ignore")
    from typer.testing import CliRunner

    from bench.__main__ import app
    from bench.accuracy import runs
    from bench.accuracy.runs import BATCH, Data, Point, Runner, Setting, Sizes, read_data
    from bench.baselines.adapted import AdaptedModel
    from bench.baselines.peft_adapters import VARIANTS, PeftModel, Variant
    from bench.baselines.rounding import load_model, round_weights
    from bench.baselines.steps import EagerMobizo
    from bench.tiny import write_base, write_sentences
    from bench.training.runs import Contender, Evaluation, Run
    from server.compiler import inspect_base
    from tests.device_agent.conftest import TASK

pytestmark = pytest.mark.filterwarnings(
    "ignore:::executorch", "ignore:::torch", "ignore:::copyreg", "ignore:::transformers", "ignore:::peft"
)

LENGTH = 40


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("tiny") / "base")


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sentences(tmp_path_factory.mktemp("tiny") / "data")


@pytest.fixture
def model(base: Path) -> object:
    return load_model(str(base), "cpu", "float32")


@pytest.fixture(scope="module")
def shape(base: Path) -> BaseShape:
    return inspect_base(str(base))


def recipe_of(queries: int = 1, **settings: object) -> Recipe:
    defaults = {"sequence_length": LENGTH, "answer_length": 6, "choices": 2, "rank": 3, "alpha": 6}
    reference = BaseRef(name="tiny", sha256="0" * 64)
    return Recipe.model_validate({"base": reference, "queries": queries, "effective_batch": 4} | defaults | settings)


@pytest.fixture(scope="module")
def batch(base: Path, sentences: Path) -> tuple[np.ndarray, ...]:
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    return pack_step(load_examples(sentences / "train.jsonl", TASK, tokenizer, recipe_of())[:4], recipe_of())


def data_of(sentences: Path) -> Data:
    records = {path.stem: list(read_jsonl(path)) for path in sentences.glob("*.jsonl")}
    return Data("sentences", TASK, records["train"], records["validation"], records["test"])


def runner_of(base: Path, sentences: Path, keep: Path) -> Runner:
    return Runner(Setting(str(base), "cpu", "float32", LENGTH), data_of(sentences), keep)


def contender(name: str, engine: str, **fields: object) -> Contender:
    return Setting("", "cpu", "float32", LENGTH).contender(name, engine, **fields)


def trained_count(variant: Variant, shape: BaseShape, recipe: Recipe, vera_rank: int) -> int:
    """As the papers of the adapters say it."""
    modules = lora_modules(recipe, shape)
    ins, outs = sum(m.in_features for m in modules), sum(m.out_features for m in modules)
    return {
        "lora": recipe.rank * (ins + outs),
        "lora-fa": recipe.rank * outs,
        "dora": recipe.rank * (ins + outs) + outs,  # and a magnitude for each output
        "vera": vera_rank * len(modules) + outs,  # a scale for each rank and each output
    }[variant]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_begins_at_the_base_moves_and_is_taken_off(
    model: torch.nn.Module, shape: BaseShape, batch: tuple[np.ndarray, ...], variant: Variant
) -> None:
    recipe = recipe_of(loss="full")
    stock = {name: value.clone() for name, value in model.state_dict().items()}
    plain = AdaptedModel(model, recipe, shape)
    with torch.no_grad():
        expected = plain.losses(batch, plain.zeros().unsqueeze(0))
    plain.remove()
    peft = PeftModel(model, recipe, shape, variant, vera_rank=5)
    start = peft.start()
    assert len(start) == peft.size == trained_count(variant, shape, recipe, 5)
    mezo = EagerMobizo(peft, "sequential")
    with torch.no_grad():
        torch.testing.assert_close(peft.losses(batch, start.unsqueeze(0)), expected, rtol=1e-5, atol=1e-5)
        elsewhere = start + torch.from_numpy(np.random.default_rng(4).normal(0, 1, peft.size).astype(np.float32))
        assert not torch.allclose(peft.losses(batch, elsewhere.unsqueeze(0)), expected, rtol=1e-4)
    mezo.step(batch, query_seeds(1, 0, 1), 0.1, 1e-2)
    assert (mezo.b != start).all()  # signs leave out nothing
    peft.remove()
    assert {name: value.tolist() for name, value in model.state_dict().items()} == {
        name: value.tolist() for name, value in stock.items()
    }


def test_pefts_lora_fa_is_ours_with_the_same_a(
    model: torch.nn.Module, shape: BaseShape, batch: tuple[np.ndarray, ...]
) -> None:
    recipe = recipe_of(loss="full")
    modules = lora_modules(recipe, shape)
    ours = AdaptedModel(model, recipe, shape)
    b = torch.from_numpy(np.random.default_rng(3).normal(0, 0.3, ours.size).astype(np.float32))
    with torch.no_grad():
        expected = ours.losses(batch, b.unsqueeze(0))
    ours.remove()
    peft = PeftModel(model, recipe, shape, "lora-fa", 0)
    layers = dict(model.named_modules())
    for module in modules:
        layers[module.name].lora_A["default"].weight.data = torch.from_numpy(init_a(recipe, module)).T.contiguous()
    theirs = torch.cat([torch.from_numpy(module.b(b.numpy())).T.reshape(-1) for module in modules])
    with torch.no_grad():
        torch.testing.assert_close(peft.losses(batch, theirs.unsqueeze(0)), expected)


def rounded(weight: np.ndarray, largest: int, group: int) -> np.ndarray:
    """Symmetric rounding in NumPy: the largest of each `group` inputs is `largest` steps."""
    blocks = weight.reshape(len(weight), -1, group)
    steps = np.abs(blocks).max(2, keepdims=True) / largest
    return (np.round(blocks / steps) * steps).reshape(weight.shape)


@pytest.mark.parametrize(("precision", "largest"), [("int8-weight", 127)])
def test_rounded_weights_lie_on_the_precisions_grid(model: torch.nn.Module, precision: str, largest: int) -> None:
    before = {name: parameter.detach().clone().numpy() for name, parameter in model.named_parameters()}
    round_weights(model, precision)  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        rounded_weight, original = parameter.detach().numpy(), before[name]
        if "norm" in name:
            np.testing.assert_array_equal(rounded_weight, original)
        else:
            is_table = "embed" in name
            expected = rounded(original, 127 if is_table else largest, original.shape[1])
            np.testing.assert_allclose(rounded_weight, expected, atol=1e-6)
            assert not np.array_equal(rounded_weight, original)


def stock_accuracy(model: torch.nn.Module, tokenizer: Tokenizer, data: Data) -> float:
    """Share of test records whose right answer the stock model gives the highest log-probability."""
    right = 0
    for location, record in data.test:
        question = read_question(data.task, record, location)
        scores = []
        for choice in question.choices:
            prompt = tokenizer.encode(choice.prompt).ids
            tokens = torch.tensor([tokenizer.encode(choice.prompt + choice.answer).ids])
            with torch.no_grad():
                logits = torch.log_softmax(model(tokens).logits[0, :-1], -1)
            scores.append(logits.gather(1, tokens[0, 1:, None])[len(prompt) - 1 :].sum().item())
        right += int(np.argmax(scores)) == question.correct
    return right / len(data.test)


def test_zero_shot_is_the_stock_models_accuracy(
    base: Path, sentences: Path, model: torch.nn.Module, tmp_path: Path
) -> None:
    runner = runner_of(base, sentences, tmp_path)
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    outcome = runner.zero_shot()
    assert outcome.best == outcome.final == pytest.approx(stock_accuracy(model, tokenizer, data_of(sentences)))


def test_a_run_at_rate_zero_or_nearly_so_ends_where_it_began(base: Path, sentences: Path, tmp_path: Path) -> None:
    runner = runner_of(base, sentences, tmp_path)
    zero_shot = runner.zero_shot()
    run = runner.run(contender("still", "mobizo", queries=4, steps=3, interval=2), Point(1e-12), 0)
    assert [evaluation.step for evaluation in run.evaluations] == [0, 2, 3]
    assert run.final == zero_shot.final
    for evaluation in run.evaluations:
        assert evaluation.accuracy == zero_shot.evaluations[0].accuracy
        assert evaluation.loss == pytest.approx(zero_shot.evaluations[0].loss, rel=1e-5)


def test_a_kept_run_is_not_run_again(base: Path, sentences: Path, tmp_path: Path) -> None:
    kept_contender = contender("one", "mobizo", steps=2)
    first = runner_of(base, sentences, tmp_path).run(kept_contender, Point(1e-3), 0)
    second_runner = runner_of(base, sentences, tmp_path)

    def refuse(*_: object) -> None:
        raise AssertionError("a kept run was run again")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "load_model", refuse)
        assert second_runner.run(kept_contender.model_copy(update={"name": "two"}), Point(1e-3), 0) == first.model_copy(
            update={"contender": "two"}
        )
        for changed_contender in (
            contender("one", "mobizo", steps=3),
            contender("one", "mobizo", steps=2, precision="int8-weight"),
        ):
            with pytest.raises(AssertionError, match="run again"):
                second_runner.run(changed_contender, Point(1e-3), 0)
        with pytest.raises(AssertionError, match="run again"):
            second_runner.run(kept_contender, Point(1e-3), 1)


def evaluation(step: int, accuracy: float, loss: float) -> Evaluation:
    return Evaluation(step=step, core_seconds=0, seconds=0, accuracy=accuracy, loss=loss)


@pytest.fixture
def outcomes() -> Iterator[Run]:
    def outcome(lr: float, accuracy: float, loss: float, diverged: bool = False) -> Run:
        evaluations = [evaluation(0, 0.5, 1.0), evaluation(4, accuracy, loss)]
        fields = {"contender": "one", "precision": "fp32", "seed": 3, "lr": lr, "eps": 1e-2, "split": "validation"}
        return Run(**fields, evaluations=evaluations, diverged=diverged)

    return iter((outcome(1, 0.6, 0.9), outcome(2, 0.7, 0.8), outcome(3, 0.7, 0.7), outcome(4, 0.9, 0.1, diverged=True)))


def test_the_rate_is_the_best_on_validation_that_did_not_diverge(
    base: Path, sentences: Path, tmp_path: Path, outcomes: Iterator[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(base, sentences, tmp_path)
    by_lr = {outcome.lr: outcome for outcome in outcomes}
    calls: list[tuple[float, int]] = []

    def run(_contender: Contender, point: Point, seed: int) -> Run:
        calls.append((point.lr, seed))
        return by_lr[point.lr].model_copy(update={"seed": seed})

    monkeypatch.setattr(runner, "run", run)
    grid = tuple(Point(lr) for lr in (1.0, 2.0, 3.0, 4.0))
    point, runs, grid_runs = runner.best_point(contender("one", "mobizo", steps=4), grid, [3, 5])
    assert point == Point(3.0)
    assert [(run.lr, run.seed) for run in runs] == [(3.0, 3), (3.0, 5)]
    assert [run.lr for run in grid_runs] == [1, 2, 3, 4]
    assert calls == [(1, 3), (2, 3), (3, 3), (4, 3), (3, 5)]


def test_where_nothing_beats_the_base_the_rate_is_of_the_lowest_loss(outcomes: Iterator[Run]) -> None:
    outcome = next(outcomes)
    worse, better = (
        outcome.model_copy(update={"evaluations": [evaluation(0, 0.5, 1.0), evaluation(4, 0.4, loss)]})
        for loss in (1.2, 0.9)
    )
    assert better.rank[1] == worse.rank[1] == (0.5, -1.0)
    assert better.rank > worse.rank


def test_divergence_ends_a_run_and_counts_as_nothing_right(
    base: Path, sentences: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(base, sentences, tmp_path)
    zero_shot = runner.zero_shot()

    def diverge(_self: object, batch: object, seeds: object, lr: float, eps: float) -> tuple[Tensor, None]:
        return torch.tensor([float("nan")]), None

    monkeypatch.setattr(EagerMobizo, "step", diverge)
    run = runner.run(contender("burst", "mobizo", queries=4, steps=5), Point(1.0), 0)
    assert run.diverged
    assert (run.final, run.best, run.best_step) == (0.0, zero_shot.best, 0)


def test_every_contender_has_as_many_sequences_in_a_step() -> None:
    recipes = [contender("", "mobizo", queries=q, steps=10).recipe for q in (1, 4, 16)]
    assert [recipe.queries * recipe.effective_batch for recipe in recipes] == [BATCH] * 3


def test_the_shipped_reviews_are_read_in_the_papers_sizes() -> None:
    movies = read_data("movies", None, Sizes(1000, 500, 1000))
    assert tuple(map(len, (movies.train, movies.validation, movies.test))) == (1000, 500, 1000)
    products = read_data("products", None, Sizes(50, 20, 30))
    assert tuple(map(len, (products.train, products.validation, products.test))) == (50, 20, 30)
    texts = [{record["text"] for _, record in split} for split in (products.train, products.validation)]
    assert not texts[0] & texts[1]


def test_the_command_writes_every_part_and_reads_other_records(base: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    labelled_words = (("warm", "positive"), ("dull", "negative"), ("bright", "positive"), ("flat", "negative"))
    lines = [json.dumps({"text": f"the film is {word}", "label": label}) + "\n" for word, label in labelled_words]
    (tmp_path / "data" / "train.jsonl").write_text("".join(lines * 6))
    (tmp_path / "data" / "test.jsonl").write_text("".join(lines))
    out = tmp_path / "found.json"
    arguments = ["accuracy", "--quick", "--part", "all", "--task", "sst2", "--data", str(tmp_path / "data")]
    arguments += ["--base", str(base), "--seq-len", str(LENGTH), "--keep", str(tmp_path / "keep"), "--json", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    contenders = {(row["contender"], row["precision"]): row for row in report["rows"]}
    main = ["zero-shot", "FO-SGD (LoRA-FA)", "MeZO (LoRA-FA)", "MobiZO q=4", "MobiZO q=16"]
    assert [contenders[name, "fp32"]["examples"] for name in main] == [0, 64, 64, 16, 4]
    # Groups of 32 do not divide this model's 48 inputs of down_proj, so int4 is left out.
    assert {precision for _, precision in contenders} == {"fp32", "int8-weight", "int4-weight"}
    claim_names = [*main, *(f"q{q}" for q in (1, 2, 4, 8, 16)), *(f"variant {name}" for name in VARIANTS)]
    claim_names += [f"MobiZO q={q} {p}" for q in (4, 16) for p in ("fp32", "int8-weight", "int4-weight")]
    names = {re.sub("[- ]", "_", re.sub("[=()]", "", name.lower())) for name in claim_names}
    assert set(report["claims"]) == {f"{final}accuracy_sst2_{name}" for name in names for final in ("", "final_")}
    best = contenders["MobiZO q=4", "fp32"]["best"]
    assert report["claims"]["accuracy_sst2_mobizo_q4"] == pytest.approx(100 * best)


def test_the_command_says_what_is_missing(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["accuracy", "--task", "copa", "--data", str(tmp_path), "--base", "none"])
    assert result.exit_code == 1
    assert "no data of 'copa'" in result.output
