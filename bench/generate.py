"""`bench generate`: generating text on the device with SmolLM2-135M-Instruct, against llama.cpp on the same cores.

Ours is what `mobizo-agent chat` runs: the inference file with an adapter, in the native runner. llama.cpp (from
xllamacpp) runs the same model without an adapter, with one thread a core as ours has: as Q8_0 by turns with our int8,
then as Q4_0 by turns with our int4. Ratios are medians over turns, time over time.

- decode: a token's time while the text is 64 and 480 tokens long. Theirs is llama.cpp's own timing, without HTTP.
- prefill: a prompt of 128 tokens.
- first token: from the text of such a prompt to the first piece of its answer, with the int8 program loaded.
- cold first token: from the start of `mobizo-agent chat` in a new process to the first byte that it prints, with the
  files in the page cache.
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np

from bench.llamacpp import LlamaCpp, write_quantized
from bench.programs import LAST_LAYERS, PRODUCTS, CompiledProgram, compile_cold, smollm2_recipe
from bench.result import Claims, write
from bench.runner import JsonFile, Keep, Quick
from bench.tiny import enrolled_home
from device_agent.home import AgentHome
from device_agent.inference.adapter_store import AdapterStore
from device_agent.inference.chat import Chat
from device_agent.inference.personal_model import PersonalModel, open_personal
from device_agent.inference.session import InferenceSession
from shared.signing import new_private_key, sign_manifest
from shared.task import Task
from shared.zo.encoding import token_ids
from shared.zo.lora import dump_adapter

RECIPE = LAST_LAYERS | {"loss": "full", "choices": 1, "sequence_length": 64, "answer_length": 48}
NAME, TASK = "alice-reviews", Task(name="reviews", kind="text")
CONTEXTS, PROMPT, DECODED = (64, 480), 128, 32  # tokens
ROUNDS, COLD_ROUNDS = 9, 7
LLAMACPP_FORMATS = {"Q8_0": "int8", "Q4_0": "int4"}  # and our precision beside each
Seconds = dict[tuple[str, str], list[float]]  # by measurement and contender


def generate(json_file: JsonFile = None, quick: Quick = False, keep: Keep = None) -> None:
    """Generate text on the device, against llama.cpp: tokens a second, prompts and the first token."""
    rounds, cold_rounds = (2, 1) if quick else (ROUNDS, COLD_ROUNDS)
    with tempfile.TemporaryDirectory() as name:
        directory = keep or Path(name)
        homes = {}
        for precision in LLAMACPP_FORMATS.values():
            program = compile_cold(smollm2_recipe(**RECIPE | {"precision": precision}), directory / precision)
            homes[precision] = make_home(Path(name) / precision, program)
        seconds: Seconds = {}
        # One after the other: a second llama.cpp in the process halves the first one's speed.
        for kind, precision in LLAMACPP_FORMATS.items():
            with closing(open_personal(homes[precision], NAME)) as model:
                text, prompt = prompt_of(model, PROMPT)
                llama = LlamaCpp(write_quantized(kind, directory / f"{kind}.gguf"), max(CONTEXTS) + DECODED)
                for number in range(rounds + 1):  # the first one warms up
                    turn = _measure_turn(model, llama, prompt, number)
                    if number:
                        for measurement, (own_seconds, llama_seconds) in turn.items():
                            seconds.setdefault((measurement, f"mobizo, by turns with {kind}"), []).append(own_seconds)
                            seconds.setdefault((measurement, kind), []).append(llama_seconds)
                del llama  # its threads end
        with closing(open_personal(homes["int8"], NAME)) as model:
            seconds["first token", "mobizo"] = [
                _seconds_of(lambda: next(Chat(model, None).answer(text))) for _ in range(rounds)
            ]
        seconds["cold first token", "mobizo"] = [_cold_start_seconds(homes["int8"], text) for _ in range(cold_rounds)]
    write(json_file, [], _claims(seconds))


def make_home(directory: Path, program: CompiledProgram) -> AgentHome:
    """Returns an agent's home with a random adapter of the program in its store."""
    key, manifest = new_private_key(), program.manifest
    home = enrolled_home(directory, key)
    home.cache.mkdir(parents=True, exist_ok=True)
    for role in ("inference", "weights", "tokenizer"):
        file = manifest.file(role)
        shutil.copy(program.directory / file.name, home.cache / file.sha256)
    flat = np.random.default_rng(0).normal(0, 1e-3, manifest.size).astype(np.float32)
    AdapterStore(home).add(NAME, dump_adapter(flat, {}), sign_manifest(manifest, key), TASK, "bench")
    return home


def prompt_of(model: PersonalModel, length: int) -> tuple[str, list[int]]:
    """Returns customers' reviews of `length` tokens, as text and as tokens."""
    lines = (PRODUCTS / "train.jsonl").read_text().splitlines()
    words = " ".join(json.loads(line)["text"] for line in lines[: 2 * length]).split()
    for count in range(length // 2, len(words)):
        text = " ".join(words[:count])
        tokens = token_ids(model.tokenizer, text)
        if len(tokens) >= length:
            return text, tokens[:length]
    raise SystemExit(f"{PRODUCTS} has no text of {length} tokens")


def _measure_turn(
    model: PersonalModel, llama: LlamaCpp, prompt: list[int], number: int
) -> dict[str, tuple[float, float]]:
    """Measures the agent and llama.cpp once, on prompts of random tokens that differ from turn to turn."""
    seconds: dict[str, tuple[float, float]] = {}
    rng = np.random.default_rng(number)
    for context in CONTEXTS:
        tokens = rng.integers(1000, model.manifest.shape.vocabulary, context - DECODED // 2).tolist()
        llama_seconds = llama.decode(tokens, DECODED)
        seconds[f"decode at {context}"] = decode_seconds(model.inference, tokens), llama_seconds
    shuffled = rng.permutation(prompt).tolist()
    llama_seconds = llama.prefill(shuffled)
    seconds["prefill"] = _seconds_of(lambda: next(model.inference.generate(shuffled, 1))), llama_seconds
    return seconds


def decode_seconds(inference: InferenceSession, tokens: list[int], count: int = DECODED) -> float:
    """Returns the seconds of one token after the prompt, the mean of `count`."""
    generated = inference.generate(tokens, count + 1)
    next(generated)
    return _seconds_of(lambda: sum(1 for _ in generated)) / count


def _seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _cold_start_seconds(home: AgentHome, text: str) -> float:
    """Returns the seconds from the start of `mobizo-agent chat` to its first output."""
    command = [sys.executable, "-W", "ignore", "-m", "device_agent", "chat", NAME, "--home", str(home.path)]
    command += ["--form", "plain", "--max-tokens", "4", "--text", text]
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    start = time.perf_counter()
    with subprocess.Popen(command, bufsize=0, stdout=pipe, stderr=null) as process:
        assert process.stdout is not None  # a pipe
        first_byte = process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.stdout.read()
    if process.returncode or not first_byte:
        raise SystemExit("`mobizo-agent chat` printed no answer")
    return seconds


def _ratios(seconds: Seconds, measurement: str, kind: str) -> float:
    pairs = zip(seconds[measurement, f"mobizo, by turns with {kind}"], seconds[measurement, kind], strict=True)
    return statistics.median(own_seconds / llama_seconds for own_seconds, llama_seconds in pairs)


def _claims(seconds: Seconds) -> Claims:
    decoding = [f"decode at {context}" for context in CONTEXTS]
    claims: Claims = {}
    for kind, suffix in zip(LLAMACPP_FORMATS, ("", "_q4_0"), strict=True):
        claims[f"decode_vs_llamacpp{suffix}"] = max(_ratios(seconds, measurement, kind) for measurement in decoding)
        claims[f"prefill_vs_llamacpp{suffix}"] = _ratios(seconds, "prefill", kind)
    claims["first_token_seconds"] = statistics.median(seconds["first token", "mobizo"])
    claims["cold_first_token_seconds"] = statistics.median(seconds["cold first token", "mobizo"])
    for context, measurement in zip(CONTEXTS, decoding, strict=True):
        claims[f"tokens_per_second_at_{context}"] = 1 / statistics.median(
            seconds[measurement, "mobizo, by turns with Q8_0"]
        )
    return claims
