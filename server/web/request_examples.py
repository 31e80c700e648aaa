"""An example of every JSON body, by the name of its model, for the OpenAPI description."""

from __future__ import annotations

from typing import Any

_KEY, _SIGNATURE = "A" * 43 + "=", "A" * 86 + "=="  # base64 of 32 and of 64 bytes
_RECIPE = {"precision": "int8", "layers": "last:8"}

REQUEST_EXAMPLES: dict[str, dict[str, Any]] = {
    "Advertisement": {"member": "dev_1", "identity": _KEY, "sealing": _KEY, "masking": _KEY, "signature": _SIGNATURE},
    "ChatRequest": {
        "model": "alice-replies",
        "messages": [{"role": "user", "content": "Can we move the meeting to Friday?"}],
        "max_tokens": 64,
    },
    "ChosenStart": {"start": {"adapter": "alice-movies", "revision": "0" * 40}},
    "ClassifyRequest": {"fields": {"text": "A gripping film."}},
    "CohortSettings": {
        "name": "movies",
        "base": "smollm2",
        "task": "sst2",
        "dataset": "movies",
        "recipe": _RECIPE,
        "training": {"steps": 50},
        "quorum": 3,
    },
    "Completion": {
        "adapter_sha256": "0" * 64,
        "result": {
            "steps": 200,
            "best_step": 150,
            "train_seconds": 40.5,
            "seconds": 52.0,
            "peak_rss_bytes": 410_000_000,
            "zero_shot_accuracy": 0.5,
            "tuned_accuracy": 0.75,
            "accuracy_split": "test",
        },
    },
    "CompletionRequest": {"model": "alice-movies@v2", "prompt": "A gripping film. It was", "max_tokens": 4},
    "Consent": {"signature": _SIGNATURE},
    "Decision": {"reason": "compared with the previous version on new reviews"},
    "Decline": {"needed_bytes": 900_000_000, "available_bytes": 600_000_000},
    "DeviceChange": {"labels": {"site": "berlin", "model": None}},
    "DeviceEnrollment": {"name": "alice-jetson", "public_key": _KEY, "platform": "Linux-6.8-aarch64"},
    "EnrollmentRequest": {"users": ["alice"], "expires_in_seconds": 3600},
    "JobError": {"code": "runtime-failed", "detail": "the runner ended with signal 9; probably out of memory"},
    "JobRequest": {
        "base": "smollm2",
        "user": "alice",
        "adapter": "alice-movies",
        "task": "sst2",
        "dataset": "movies",
        "recipe": _RECIPE,
        "training": {"steps": 200},
    },
    "LeaseRequest": {"datasets": ["movies"], "wait_seconds": 20, "memory_bytes": 4_000_000_000},
    "MemberRequest": {"device": "dev_1"},
    "PrivacyBudget": {"epsilon": 8, "delta": 1e-5},
    "Progress": {"phase": "training", "step": 20, "steps": 200, "loss": 0.69},
    "Promotion": {"revision": "v2", "reason": "the newer version answers too tersely"},
    "RuleChange": {"rule": {"automatic": True, "margin": 0.01}},
    "ScoreRequest": {
        "rows": [{"adapter": "alice-movies", "prompt": "A gripping film. It was", "answers": [" great", " terrible"]}]
    },
    "SealedShares": {"sealed": "", "commitment": _KEY},
    "TokenRequest": {"name": "shop backend", "role": "app", "expires_in_days": 90},
    "Unmasking": {"seeds": "", "keys": ""},
    "WebhookRequest": {"url": "https://shop.example/mobizo", "events": ["job.succeeded", "version.held"]},
}
