"""Does what lines of JSON say with the huggingface_hub that this process finds, and answers each with one."""

import dataclasses
import json
import sys

import huggingface_hub
from huggingface_hub import HfApi


def json_value(value):
    """What JSON has no word for."""
    if dataclasses.is_dataclass(value):
        return {
            field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)
        }
    if hasattr(value, "__iter__"):
        return list(value)
    return str(value)


def call(name, arguments, options):
    if name == "version":
        return huggingface_hub.__version__
    kind, _, method = name.rpartition(".")
    if kind:
        arguments_of_client = {"endpoint": options.pop("endpoint", None), "token": options.pop("token", None)}
        return getattr(HfApi(**arguments_of_client), method)(*arguments, **options)
    return getattr(huggingface_hub, name)(*arguments, **options)


for line in sys.stdin:
    request = json.loads(line)
    try:
        reply = {"value": call(request["call"], request["arguments"], request["options"])}
        answer = json.dumps(reply, default=json_value)
    except Exception as error:
        classes = [kind.__name__ for kind in type(error).__mro__]
        answer = json.dumps({"raised": {"name": classes[0], "classes": classes, "text": str(error)}})
    sys.stdout.write(answer + "\n")
    sys.stdout.flush()
