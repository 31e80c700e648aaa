"""Conversations that other libraries hold over OpenAI's routes: LangChain's client, and LiteLLM's.

They run as processes of their own (`python -m tests.other_clients NAME URL TOKEN MODEL TEXT`): both libraries leave
event loops open, and take seconds to load.
"""

import json
import os
import subprocess
import sys

import pytest

TURNS = [("system", "warm"), ("user", "dull plot")]


def langchain_turns(url, token, model, second):
    """Asks TURNS and then `second` after the first answer, with ChatOpenAI; returns both answers."""
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=url, api_key=token, model=model, temperature=0, max_tokens=3, max_retries=0)
    first = chat.invoke(TURNS)
    return [str(answer.content) for answer in (first, chat.invoke([*TURNS, first, ("user", second)]))]


def litellm_turns(url, token, model, second):
    """Asks the same with `litellm.completion`."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch a price list
    import litellm

    turns = [{"role": role, "content": content} for role, content in TURNS]
    answers = []
    for text in (second, None):
        response = litellm.completion(
            f"openai/{model}", turns, api_base=url, api_key=token, temperature=0, max_tokens=3, num_retries=0
        )
        message = response.choices[0].message
        answers.append(message.content)
        turns += [message, {"role": "user", "content": text}]
    return answers


CLIENTS = {"langchain": langchain_turns, "litellm": litellm_turns}
other_clients = pytest.mark.parametrize("name", CLIENTS)


def answers_of(name, url, token, model, second):
    """Returns the answers that a library gets, in a process of its own."""
    command = [sys.executable, "-m", "tests.other_clients", name, url, token, model, second]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])


def plain_answers(client, model, second):
    """Asks the same with the `openai` client, with the answer's text alone as the assistant's turn."""
    turns = [{"role": role, "content": content} for role, content in TURNS]
    answers = []
    for _ in range(2):
        answer = client.chat.completions.create(model=model, messages=turns, temperature=0, max_tokens=3)
        answers.append(answer.choices[0].message.content)
        turns += [{"role": "assistant", "content": answers[-1]}, {"role": "user", "content": second}]
    return answers


if __name__ == "__main__":
    sys.stdout.write(json.dumps(CLIENTS[sys.argv[1]](*sys.argv[2:])))
