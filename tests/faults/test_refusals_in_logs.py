"""What the log says of refused requests: enough to find the cause, nothing of what the user wrote."""

CANARY = "canary-7c1f-of-a-user"


def test_no_prompt_in_the_log(server, http):
    refused = http.post("/generate", json={"inputs": CANARY, "parameters": {"max_new_tokens": -1}})
    assert refused.status_code == 422
    http.get("/health")
    assert CANARY not in server.log
