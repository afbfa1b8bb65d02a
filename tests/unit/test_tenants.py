"""Who is the same tenant."""

from text_generation_inference.api.tenants import key_of


def test_one_key_is_one_tenant_in_either_header() -> None:
    assert (
        key_of({"authorization": "Bearer abc"})
        == key_of({"x-api-key": "abc"})
        == key_of({"authorization": "bearer abc"})
    )
    assert key_of({"authorization": "Bearer abc", "x-api-key": "other"}) == key_of({"x-api-key": "abc"})


def test_others_are_others() -> None:
    given = [
        {"x-api-key": "abc"},
        {"x-api-key": "Bearer abc"},
        {"authorization": "Basic abc"},
        {"authorization": "Bearer"},
    ]
    assert len({key_of(headers) for headers in given}) == len(given)
    assert key_of({}) == ""
