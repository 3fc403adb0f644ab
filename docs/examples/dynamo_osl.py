"""Tell a Dynamo frontend how long an answer is expected to be."""

import json
from http.client import HTTPConnection


def post(address, path, body, **headers):
    connection = HTTPConnection(address)
    connection.request("POST", path, json.dumps(body), headers)
    return json.load(connection.getresponse())


def ask(chat, frontend, predictor, token):
    question = {"model": chat["model"], "prompt": chat["messages"][-1]["content"]}
    known = post(predictor, "/predict", question, Authorization=f"Bearer {token}")
    hints = {"osl": known["osl"]} if "osl" in known else {}
    return post(frontend, "/v1/chat/completions", {**chat, "nvext": {"agent_hints": hints}})
