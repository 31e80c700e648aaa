"""Memory of executors over many calls."""

from contextlib import closing

import pytest

from device_agent.executors.program import TrainingProgram
from shared.zo.noise import query_seeds
from shared.zo.packing import pack_score, pack_step


@pytest.mark.parametrize("launcher", ["native", "python"], indirect=True)
def test_alternating_steps_and_scores_gathers_no_memory(launcher, rademacher, dataset):
    program, recipe = rademacher, rademacher.manifest.recipe
    examples = program.examples(dataset)
    step, score = pack_step(examples[: recipe.effective_batch], recipe), next(iter(pack_score(examples, recipe)))
    with closing(TrainingProgram(program.manifest, launcher.launch(program.manifest, *program.files))) as runtime:

        def alternate(times):
            for number in range(times):
                runtime.score(score.inputs)
                runtime.step(step, query_seeds(5, number, recipe.queries), 0.05, 0.01)

        alternate(20)
        before = runtime.usage().rss_bytes
        alternate(150)
        # Methods loaded and unloaded within one program would leave 60 KB each behind, 18 MB in all.
        assert runtime.usage().rss_bytes - before < 4 << 20
