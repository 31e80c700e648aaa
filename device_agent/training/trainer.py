"""MobiZO training on a device (Gao et al., EMNLP 2025, Algorithm 1).

    for each step:                                                         Trainer.train
        batch of E examples, directions z_1 ... z_q from the step's seeds  Trainer._compute, Trainer._seeds
        L+_i, L-_i = losses at B + eps z_i and at B - eps z_i              }
        c_i = lr (L+_i - L-_i) / (2 eps q)                                 } one call of TrainingProgram.step
        B = B - sum of c_i z_i                                             }
        c_1 ... c_q are written to the trajectory                          Trainer._step

The trajectory has every step's coefficients and every evaluation before the next step begins. Recorded steps are
replayed and never computed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from device_agent.durable import read_document, write_document
from device_agent.errors import Diverged, Stopped
from device_agent.executors import F32, I32, Arrays
from device_agent.executors.program import TrainingProgram, scalar
from device_agent.training.baseline import Baseline, measure_baseline
from device_agent.training.batch_sampler import BatchSampler
from device_agent.training.data import Splits
from device_agent.training.dp_sampling import DPSamples
from device_agent.training.evaluation import SplitMetrics, log_probabilities, split_metrics
from device_agent.training.prefix import Positions, PrefixCache, UpcomingTexts, prefix_cache, split_prefix
from device_agent.training.progress import RunProgress
from device_agent.training.result import build_result, out_of_patience, recorded, uploaded_validation
from device_agent.training.run_directory import References, ResourceUsage, RunDirectory
from device_agent.training.run_plan import RunPlan
from device_agent.training.start_measurements import StartMeasurements
from shared.job import Progress
from shared.privacy import ExamplePrivacy
from shared.recipe import PREFERENCE_LOSSES, Recipe
from shared.result import Result
from shared.zo.encoding import Example, Row, Tokens
from shared.zo.noise import DOMAIN_DROPOUT, query_seeds, stream_key, threefry2x32, uniform
from shared.zo.packing import pack_preferences, pack_step, step_texts
from shared.zo.proximal import proximal_step
from shared.zo.trajectory import Evaluation, TrajectoryFile

SLICE_SECONDS = 0.1  # of a pause, between two checks whether to stop
KEPT = 8  # last tokens of a prompt, which are never left out: they say what is asked for

Split = Literal["train", "validation", "test", "earlier", "reference"]


class Trainer:
    """Trains one run from the state of its directory to a result."""

    def __init__(
        self,
        run: RunDirectory,
        plan: RunPlan,
        splits: Splits,
        program: TrainingProgram,
        report: Callable[[Progress], None],
        stop: Callable[[], bool],
        rest: Callable[[], float] = lambda: 0.0,
        frozen: PrefixCache | None = None,
        kept: StartMeasurements | None = None,
    ) -> None:
        """report: called with the progress after steps and evaluations. stop: asked before each call of the program.

        rest: returns the seconds to pause after a step for each second that it took. frozen: a cache that this run
        shares with others of the program and of its rule for lengths; None: its own. kept: by earlier runs; None:
        everything is measured.
        """
        self._run, self._plan, self._splits, self._program = run, plan, splits, program
        self._stop, self._rest, self._kept = stop, rest, kept
        self._settings, self._recipe = plan.training, plan.manifest.recipe
        self._eps = plan.training.eps_for(plan.manifest.recipe)
        seed, batch, share = plan.training.seed, self._recipe.examples_per_step, plan.training.rehearsal
        self._order = BatchSampler.of(splits.train, seed, batch, splits.rehearsed, share)
        self._dp_samples: DPSamples | None = None if plan.privacy is None else run.dp_samples(plan, len(splits.train))
        self._prefix = frozen or prefix_cache(program, plan.manifest, dynamic=plan.dynamic_length)
        self._start, self._algorithm = plan.begin_b(), plan.device_algorithm
        self._divergence: Arrays = ()
        if self._recipe.kl:
            self._divergence = np.array([self._settings.kl_weight], np.float32), self._start
        self._trajectory_file = TrajectoryFile(run.trajectory, plan.header)
        self._trajectory = self._trajectory_file.trajectory
        self._progress = RunProgress(plan, self._trajectory, run.figures(), program, report)
        self._upcoming = UpcomingTexts(self._texts_from(self._steps))

    def train(self) -> Result:
        """Trains to the end; best.safetensors, last.safetensors and result.json are then in the run's directory.

        Raises Stopped, Diverged, or RuntimeFailed.
        """
        try:
            self._add_references()
            self._restore_b(self._steps)
            if self._steps == 0:
                self._evaluate("test", self._splits.test)
                self._evaluate("earlier", self._splits.earlier)
                self._evaluate("reference", self._splits.reference)
            # Evaluations that the trajectory has are skipped: a kill may have come just before one or just after.
            while self._steps < self._settings.steps:
                if self._steps % self._settings.evaluation_interval == 0:
                    self._evaluate("validation", self._splits.validation)
                    if out_of_patience(self._trajectory, self._settings.patience):
                        break
                self._step()
            self._evaluate("validation", self._splits.validation)
            result = self._build_result()
            self._run.finish(result)
            return result
        finally:
            self._trajectory_file.close()
            self._record_usage()

    def _step(self) -> None:
        """Computes the next step and records it."""
        step, lr = self._steps, self._plan.lr_at(self._steps)
        self._check_stop()
        began = time.monotonic()
        losses, coefficients = self._compute(step, lr)
        if not (np.isfinite(losses).all() and np.isfinite(coefficients).all()):
            raise Diverged(f"training diverged at step {step}: the loss is NaN or infinite; lower lr")
        rates = [self._settings.lr_at(step)]
        factor = self._algorithm.proximal_factor(rates) if self._algorithm.has_proximal_term else None
        self._trajectory_file.append_step(coefficients, factor)
        self._proximal_step(step)
        seconds, rest = time.monotonic() - began, self._rest()
        self._progress.count_step(seconds, float(losses.mean()) if self._dp_samples is None else None)
        self._progress.report("training", lr=lr, rest=rest)
        self._pause(seconds * rest)

    def _compute(self, step: int, lr: float) -> tuple[F32, F32]:
        """Updates B by one step. Returns its losses (2q,), or noised totals (q,) if private, and coefficients (q,)."""
        if self._dp_samples is None or self._plan.privacy is None:
            return self._update(step, lr, self._order.indices(step))
        return self._update_privately(step, lr, self._dp_samples, self._plan.privacy)

    def _update_privately(self, step: int, lr: float, samples: DPSamples, privacy: ExamplePrivacy) -> tuple[F32, F32]:
        """Like `_compute`, on the step's secret sample.

        A sample over E takes several calls. The last one adds the noise, and it alone moves B.
        """
        *pieces, last = samples.pieces(step, self._recipe.effective_batch)
        summed = np.zeros(self._recipe.queries, np.float32)
        for piece in pieces:
            self._check_stop()
            summed, _ = self._update(step, 0.0, piece, (scalar(privacy.clip), summed))
        return self._update(step, lr, last, (scalar(privacy.clip), summed + samples.noise[step]))

    def _update(self, step: int, lr: float, indices: list[int], secret: Arrays = ()) -> tuple[F32, F32]:
        """Calls the program's step once, on the training examples with these indices. secret: of a private step."""
        examples = [self._splits.train[index] for index in indices]
        texts, kept = step_texts(examples, self._recipe), None
        if share := self._settings.token_dropout:
            numbered = zip(indices, examples, strict=True)
            examples, kept = drop_tokens(numbered, self._recipe, share, self._settings.seed, step)
        batch: Arrays = (
            *pack_step(examples, self._recipe, dynamic=self._plan.dynamic_length),
            *pack_preferences(examples, self._recipe, self._settings),
            *self._divergence,
        )
        began = time.monotonic()
        hidden, batch = split_prefix(self._prefix, texts, batch, self._upcoming, kept=kept)
        output = self._call_program(step, lr, batch, hidden, secret)
        self._progress.program_seconds += time.monotonic() - began
        return output

    def _call_program(self, step: int, lr: float, batch: Arrays, hidden: F32 | None, secret: Arrays) -> tuple[F32, F32]:
        """Calls the program's `step`. hidden: the frozen layers' output; `batch` then has no tokens."""
        return self._program.step(batch, self._seeds(step), lr, self._eps, secret, hidden)

    def _seeds(self, step: int) -> I32:
        """Returns the seeds (q, 2) of a step's directions."""
        return query_seeds(self._settings.seed, step, self._recipe.queries)

    def _proximal_step(self, step: int) -> None:
        """Moves B towards the start by the recorded factor of a step, in a run with a proximal term."""
        if self._algorithm.has_proximal_term:
            factor = self._trajectory.proximal_factors[step]
            self._program.load(proximal_step(self._program.adapter(), self._start, factor))

    def _restore_b(self, steps: int) -> None:
        """Makes the program's B what it was after `steps` steps, by the program's own arithmetic."""
        self._progress.report("loading")
        self._program.load(self._start)
        for step, coefficients in enumerate(self._trajectory.coefficients[:steps]):
            self._check_stop()
            self._program.replay(self._seeds(step), coefficients, self._eps)
            self._proximal_step(step)

    def _add_references(self) -> None:
        """Adds the log-probabilities at the run's start to the examples of preferences; they are computed once."""
        if self._recipe.loss not in PREFERENCE_LOSSES:
            return
        by_split: dict[Split, Sequence[Example]] = {
            "train": self._splits.train,
            "validation": self._splits.validation,
            "test": self._splits.test or (),
        }
        references = read_document(self._run.references_file, References)
        if references is None:
            self._program.load(self._start)
            scores = {name: self._score(name, examples, self._recipe) for name, examples in by_split.items()}
            references = References.model_validate(scores)
            write_document(self._run.references_file, references)
        train, validation, test = (
            [replace(example, reference=own) for example, own in zip(examples, references.root[name], strict=True)]
            for name, examples in by_split.items()
        )
        self._splits = replace(self._splits, train=train, validation=validation, test=test or None)

    def _score(self, split: Split, examples: Sequence[Example], recipe: Recipe) -> list[list[float]]:
        """Returns the log-probabilities of each example's rows under the present B."""
        frozen, reserved = self._evaluation_cache(split)
        public = [example.rows[0].tokens for example in examples] if frozen and split == "reference" else []
        if frozen and self._kept and public and (states := self._kept.states(examples)) is not None:
            frozen.add(public, states, reserved)
        dynamic = self._plan.dynamic_length
        scores = log_probabilities(
            self._program, examples, recipe, self._before_evaluation, dynamic=dynamic, frozen=frozen, reserved=reserved
        )
        if frozen and self._kept and (states := frozen.states(public)) is not None:
            self._kept.keep_states(examples, states)
        return scores

    def _before_evaluation(self) -> None:
        self._check_stop()
        self._progress.report("evaluating")

    def _evaluate(self, split: Split, examples: Sequence[Example] | None, *, best: int | None = None) -> None:
        """Measures B and records it, unless the trajectory has it. best: the step of B, if it is the best one's.

        A private run measures nothing on its data.
        """
        step = self._steps if best is None else best
        adapter: Literal["current", "best"] = "current" if best is None else "best"
        known = recorded(self._trajectory, split, step, adapter)
        if self._dp_samples is not None or examples is None or known is not None:
            return

        recipe = self._recipe.model_copy(update={"loss": "full"}) if split == "reference" else self._recipe
        if recipe.loss in PREFERENCE_LOSSES and self._steps == 0:
            measured = split_metrics(examples, [example.reference for example in examples], recipe)
        elif step == 0 and self._kept is not None:
            measured = self._kept.metrics(examples, recipe.loss, lambda: self._measure(split, examples, recipe))
        else:
            measured = self._measure(split, examples, recipe)
        evaluation = Evaluation(step=step, split=split, adapter=adapter, **vars(measured))
        self._trajectory_file.append_evaluation(evaluation)
        self._record_usage()
        self._progress.report("evaluating")

    def _measure(self, split: Split, examples: Sequence[Example], recipe: Recipe) -> SplitMetrics:
        """Returns the metrics of the present B."""
        return split_metrics(examples, self._score(split, examples, recipe), recipe)

    def _build_result(self) -> Result:
        """Writes both adapters, measures the best on the test split, and sums up."""
        best, last_step = uploaded_validation(self._plan, self._trajectory), self._steps
        best_step = last_step if best is None else best.step
        last = self._program.adapter()
        if best_step != last_step:
            self._restore_b(best_step)
        best_adapter = self._program.adapter()
        if not np.isfinite(best_adapter).all():
            raise Diverged("training diverged: the adapter has values that are NaN or infinite; lower lr")
        self._run.write_adapter(self._run.last, last, self._plan, last_step)
        self._run.write_adapter(self._run.best, best_adapter, self._plan, best_step)
        self._evaluate("test", self._splits.test, best=best_step)
        self._evaluate("earlier", self._splits.earlier, best=best_step)
        self._evaluate("reference", self._splits.reference, best=best_step)
        return build_result(self._plan, self._trajectory, self._record_usage(), self._splits, self._measure_baseline())

    def _measure_baseline(self) -> Baseline | None:
        """Returns what simple classifiers reach; None for texts, rounds, private runs and splits without records."""
        splits = self._splits
        if self._plan.uploads_last or self._dp_samples is not None or splits.blank or self._plan.task.generates:
            return None
        measure = measure_baseline if self._kept is None else self._kept.baseline
        return measure(splits.train, splits.test or splits.validation)

    @property
    def _steps(self) -> int:
        return self._trajectory.steps

    def _texts_from(self, step: int) -> Iterator[Tokens]:
        """Yields the texts that training visits from a step on."""
        # An order of its own, because each keeps two epochs only.
        samples = replace(self._order).indices if self._dp_samples is None else self._dp_samples.sample
        for later in range(step, self._settings.steps):
            yield from step_texts([self._splits.train[index] for index in samples(later)], self._recipe)

    def _evaluation_cache(self, split: Split) -> tuple[PrefixCache | None, int]:
        """Returns the cache for an evaluation, and the bytes of it that stay free for states that have precedence:
        training's, then validation's.
        """
        if self._prefix is None or "score_suffix" not in self._plan.manifest.methods:
            return None, 0
        if split == "train":
            return self._prefix, 0
        visited = self._settings.steps * self._recipe.effective_batch * self._recipe.sequence_length
        reserved = min(visited, sum(map(len, step_texts(self._splits.train, self._recipe))))
        if split != "validation":
            reserved += sum(len(row.tokens) for example in self._splits.validation for row in example.rows)
        return self._prefix, self._prefix.state_bytes(reserved)

    def _record_usage(self) -> ResourceUsage:
        """Records the time and memory that the run has used so far."""
        figures = self._progress.used()
        write_document(self._run.figures_file, figures)
        return figures

    def _pause(self, seconds: float) -> None:
        """Pauses, unless the run is asked to stop."""
        deadline = time.monotonic() + seconds
        while (remaining_seconds := deadline - time.monotonic()) > 0 and not self._stop():
            time.sleep(min(remaining_seconds, SLICE_SECONDS))

    def _check_stop(self) -> None:
        if self._stop():
            raise Stopped


def drop_tokens(
    numbered: Iterable[tuple[int, Example]], recipe: Recipe, share: float, seed: int, step: int
) -> tuple[list[Example], list[Positions]]:
    """Returns a step's examples without a share of their prompts' tokens, and for each text of `step_texts` the
    positions of its tokens that stay. numbered: each with its index in the training split. seed: of the job.

    Of a few hundred records a model soon knows each by a few of its words. Where other words are missing at each visit,
    it has to learn from all of them. Frozen layers read whole prompts, so that their outputs are computed once; what is
    left out is missing from the first adapted layer on.
    """
    key = stream_key(seed, DOMAIN_DROPOUT)
    thinned: list[Example] = []
    kept: list[Positions] = []
    for index, example in numbered:
        x0, x1 = threefry2x32(key, step, index)
        # Rows with the same prompt lose the same tokens.
        stays = (uniform((int(x0[0]), int(x1[0])), example.length) + 1) / 2 >= share
        rows, positions = zip(*(_thin(row, stays) for row in example.rows), strict=True)
        thinned.append(replace(example, rows=rows))
        kept += positions if recipe.loss in PREFERENCE_LOSSES else [positions[example.correct]]
    return thinned, kept


def _thin(row: Row, stays: NDArray[np.bool_]) -> tuple[Row, Positions]:
    """Returns a row, and the positions of its tokens that stay, which those of the answer do."""
    length = len(row.prompt)
    stays = stays[:length].copy()
    stays[:1] = stays[max(length - KEPT, 0) :] = True
    positions = np.flatnonzero(stays)
    prompt = tuple(row.prompt[position] for position in positions)
    return replace(row, prompt=prompt), np.append(positions, np.arange(length, len(row.tokens)))
