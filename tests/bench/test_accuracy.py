"""The contenders of `bench accuracy` on a random model, and its tables."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from shared.task_records import read_question
from shared.zo.encoding import read_jsonl

with warnings.catch_warnings():  # the compiler's libraries warn of their own deprecations as they are imported
    warnings.simplefilter("ignore")
    from bench.accuracy import runs
    from bench.accuracy.command import Budget, Tables
    from bench.accuracy.runs import Runner, Sizes, contender_of
    from bench.baselines.pytorch_model import load_model
    from bench.baselines.steps import EagerMobizo
    from bench.tiny import SPLITS, write_base, write_sentences
    from bench.training.runs import Contender, Evaluation, Run
    from tests.device_agent.conftest import TASK

pytestmark = pytest.mark.filterwarnings(
    "ignore:::executorch", "ignore:::torch", "ignore:::copyreg", "ignore:::transformers"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("tiny") / "base")


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sentences(tmp_path_factory.mktemp("tiny") / "data")


def runner_of(base: Path, sentences: Path, keep: Path) -> Runner:
    return Runner(str(base), sentences, TASK, Sizes(**SPLITS), keep)


def stock_accuracy(model: torch.nn.Module, tokenizer: Tokenizer, path: Path) -> float:
    """Share of records whose right answer the stock model gives the highest log-probability."""
    right, records = 0, list(read_jsonl(path))
    for location, record in records:
        question = read_question(TASK, record, location)
        scores = []
        for choice in question.choices:
            prompt = tokenizer.encode(choice.prompt).ids
            tokens = torch.tensor([tokenizer.encode(choice.prompt + choice.answer).ids])
            with torch.no_grad():
                logits = torch.log_softmax(model(tokens).logits[0, :-1], -1)
            scores.append(logits.gather(1, tokens[0, 1:, None])[len(prompt) - 1 :].sum().item())
        right += int(np.argmax(scores)) == question.correct
    return right / len(records)


def test_zero_shot_is_the_stock_models_accuracy(base: Path, sentences: Path, tmp_path: Path) -> None:
    outcome = runner_of(base, sentences, tmp_path).zero_shot()
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    expected = stock_accuracy(load_model(str(base)), tokenizer, sentences / "test.jsonl")
    assert outcome.best == outcome.final == pytest.approx(expected)


def test_a_run_at_rate_zero_or_nearly_so_ends_where_it_began(base: Path, sentences: Path, tmp_path: Path) -> None:
    runner = runner_of(base, sentences, tmp_path)
    zero_shot = runner.zero_shot()
    run = runner.run(contender_of("still", "mobizo", queries=4, steps=3, interval=2), 1e-12, 0)
    assert [evaluation.step for evaluation in run.evaluations] == [0, 2, 3]
    assert run.final == zero_shot.final
    for evaluation in run.evaluations:
        assert evaluation.accuracy == zero_shot.evaluations[0].accuracy
        assert evaluation.loss == pytest.approx(zero_shot.evaluations[0].loss, rel=1e-5)


def test_a_kept_run_is_not_run_again(base: Path, sentences: Path, tmp_path: Path) -> None:
    kept_contender = contender_of("one", "mobizo", steps=2)
    first = runner_of(base, sentences, tmp_path).run(kept_contender, 1e-3, 0)
    second_runner = runner_of(base, sentences, tmp_path)

    def refuse(*_: object) -> None:
        raise AssertionError("a kept run was run again")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "load_model", refuse)
        assert second_runner.run(kept_contender.model_copy(update={"name": "two"}), 1e-3, 0) == first.model_copy(
            update={"contender": "two"}
        )
        with pytest.raises(AssertionError, match="run again"):
            second_runner.run(contender_of("one", "mobizo", steps=3), 1e-3, 0)
        with pytest.raises(AssertionError, match="run again"):
            second_runner.run(kept_contender, 1e-3, 1)


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

    def run(_contender: Contender, rate: float, seed: int) -> Run:
        calls.append((rate, seed))
        return by_lr[rate].model_copy(update={"seed": seed})

    monkeypatch.setattr(runner, "run", run)
    grid = (1.0, 2.0, 3.0, 4.0)
    rate, runs, trials = runner.best_rate(contender_of("one", "mobizo", steps=4), grid, [3, 5])
    assert rate == 3.0
    assert [(run.lr, run.seed) for run in runs] == [(3.0, 3), (3.0, 5)]
    assert [run.lr for run in trials] == [1, 2, 3, 4]
    assert calls == [(1, 3), (2, 3), (3, 3), (4, 3), (3, 5)]


def test_divergence_ends_a_run_and_counts_as_nothing_right(
    base: Path, sentences: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(base, sentences, tmp_path)
    zero_shot = runner.zero_shot()

    def diverge(_self: object, batch: object, seeds: object, lr: float, eps: float) -> tuple[Tensor, None]:
        return torch.tensor([float("nan")]), None

    monkeypatch.setattr(EagerMobizo, "step", diverge)
    run = runner.run(contender_of("burst", "mobizo", queries=4, steps=5), 1.0, 0)
    assert run.diverged
    assert (run.final, run.best, run.best_step) == (0.0, zero_shot.best, 0)


def test_the_tables_claim_the_best_rates_of_all_contenders(base: Path, sentences: Path, tmp_path: Path) -> None:
    budget = Budget(Sizes(**SPLITS), (0,), 4, 4, (2e-3,), (3e-2,))
    tables = Tables(runner_of(base, sentences, tmp_path), budget)
    (rows, claims), (_, query_claims) = tables.methods(), tables.queries()
    contenders = {row["contender"]: row for row in rows}
    names = ["zero-shot", "FO-SGD (LoRA-FA)", "MeZO (LoRA-FA)", "MobiZO q=4", "MobiZO q=16"]
    assert [contenders[name]["examples"] for name in names] == [0, 64, 64, 16, 4]
    best = contenders["MobiZO q=4"]["best"]
    assert claims["accuracy_movies_mobizo_q4"] == query_claims["accuracy_movies_q4"] == pytest.approx(100 * best)
    methods = ("zero_shot", "fo_sgd_lora_fa", "mezo_lora_fa", "mobizo_q4", "mobizo_q16")
    assert set(claims) == {f"{final}accuracy_movies_{name}" for name in methods for final in ("", "final_")}
