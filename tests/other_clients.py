"""Conversations that other libraries hold over OpenAI's routes: LangChain's client, and LiteLLM's."""

import os

import pytest

TURNS = [("system", "warm"), ("user", "dull plot")]


def langchain_turns(url, token, model, second):
    """Asks TURNS and then `second` after the first answer, with ChatOpenAI; returns both answers."""
    from langchain_openai import ChatOpenAI  # takes seconds

    chat = ChatOpenAI(base_url=url, api_key=token, model=model, temperature=0, max_tokens=3, max_retries=0)
    first = chat.invoke(TURNS)
    return [str(answer.content) for answer in (first, chat.invoke([*TURNS, first, ("user", second)]))]


def litellm_turns(url, token, model, second):
    """Asks the same with `litellm.completion`."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch a price list
    import litellm  # takes seconds

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


other_clients = pytest.mark.parametrize("converse", [langchain_turns, litellm_turns])


def plain_turns(client, model, second):
    """Asks the same with the `openai` client, with the answer's text alone as the assistant's turn."""
    turns = [{"role": role, "content": content} for role, content in TURNS]
    answers = []
    for _ in range(2):
        answer = client.chat.completions.create(model=model, messages=turns, temperature=0, max_tokens=3)
        answers.append(answer.choices[0].message.content)
        turns += [{"role": "assistant", "content": answers[-1]}, {"role": "user", "content": second}]
    return answers
