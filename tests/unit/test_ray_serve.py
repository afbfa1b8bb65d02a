"""What `ray_serve` decides without Ray: options, keys of bodies, pages of metrics, how many replicas, books."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from text_generation_inference import cli
from text_generation_inference.errors import StartError
from text_generation_inference.ray_serve import command, metrics_text
from text_generation_inference.ray_serve.autoscaling import TokenPolicy, wanted_replicas
from text_generation_inference.ray_serve.options import RayOptions, launcher_arguments, read_args
from text_generation_inference.ray_serve.prompt_of_body import key_of_body
from text_generation_inference.ray_serve.routing_books import RoutingBooks


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


class TestOptions:
    def test_args_of_a_config_file(self) -> None:
        options, arguments = read_args(
            {"model_id": "org/model", "num-shard": 2, "max_replicas": 4, "target_usage": "0.5", "json_output": True}
        )
        assert options == RayOptions(max_replicas=4, target_usage=0.5)
        assert arguments == ["--model-id", "org/model", "--num-shard", "2", "--json-output"]

    def test_a_flag_without_value_that_is_false_is_left_out(self) -> None:
        assert launcher_arguments({"json_output": False}) == []

    def test_a_list_is_a_repeated_flag(self) -> None:
        asked = {"cors_allow_origin": ["http://a", "http://b"]}
        assert launcher_arguments(asked) == ["--cors-allow-origin", "http://a", "--cors-allow-origin", "http://b"]

    @pytest.mark.parametrize(
        ("args", "said"),
        [
            ({"nonsense": 1}, "`nonsense` is not a flag"),
            ({"port": 80}, "http_options"),
            ({"json_output": 3}, "true or false"),
            ({"min_replicas": 3, "max_replicas": 2}, "Given: 3 and 2"),
            ({"max_replicas": 0}, "`max_replicas` at least 1"),
            ({"min_replicas": 1, "max_replicas": 3, "initial_replicas": 4}, "`initial_replicas`"),
            ({"target_usage": 0}, "`target_usage`"),
            ({"target_queued_tokens": 0}, "`target_queued_tokens`"),
            ({"max_replicas": "many"}, "max_replicas"),
            ({"drain_timeout_s": -1}, "`drain_timeout_s`"),
            ({"ingress_replicas": 0}, "`ingress_replicas`"),
        ],
    )
    def test_what_is_refused(self, args: dict[str, Any], said: str) -> None:
        with pytest.raises(StartError, match=said):
            read_args(args)


class TestCommand:
    def test_without_ray_it_says_how_to_install_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["ray", "--max-replicas", "2"]) == 2
        assert "pip install 'text-generation-inference[ray]'" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--max-replicas", "0"],
            ["--nonsense"],
            ["--target-usage", "x"],
            ["--replica-resources", "HPU=a"],
            ["--port", "x"],
            ["--port", "70000"],
            ["--hostname", "x"],
        ],
    )
    def test_mistakes_are_told_in_a_line(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["ray", *arguments]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ") and said.count("\n") == 1 and "install" not in said

    def test_flags_of_the_launcher_are_handed_on_and_those_of_the_address_are_not(self) -> None:
        words = ["--model-id", "m", "--port", "80", "--min-replicas", "2", "--json-output", "--num-shard", "2"]
        given = command.build_ray_parser().parse_args(words)
        assert sorted(command.launcher_flags(given)) == sorted(["--model-id", "m", "--json-output", "--num-shard", "2"])
        assert command.read_address(given) == {"host": "0.0.0.0", "port": 80, "request_timeout_s": None}
        options = command.read_options(given)
        assert (options.min_replicas, options.max_replicas) == (2, 2)

    @pytest.mark.parametrize(
        ("messages", "said"),
        [
            (
                ["", "Traceback\n  RuntimeError: the server cannot start (status 3): no file\nmore"],
                "the server cannot start (status 3): no file",
            ),
            (["Failed to update"], "Failed to update"),
            ([""], "Ray does not say why"),
        ],
    )
    def test_why_it_cannot_start(self, messages: list[str], said: str) -> None:
        deployments = {str(number): SimpleNamespace(message=text) for number, text in enumerate(messages)}
        application = SimpleNamespace(message="", deployments=deployments)
        assert command.describe_failure(SimpleNamespace(applications={"tgi": application})) == said


class TestKeys:
    def test_the_next_turn_begins_with_the_last(self) -> None:
        turns = [{"role": "system", "content": "be kind " * 50}, {"role": "user", "content": "hello"}]
        first = key_of_body(body(messages=turns, max_tokens=4), {}, False)
        later = [*turns, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "and?"}]
        second = key_of_body(body(max_tokens=9, messages=later, stream=True), {}, False)
        assert len(first.hashes) > 4
        assert second.hashes[: len(first.hashes)] == first.hashes

    @pytest.mark.parametrize("field", ["inputs", "prompt"])
    def test_texts(self, field: str) -> None:
        one, two = (key_of_body(body(**{field: "word " * 60 + end}), {}, False) for end in ("a", "and more of it"))
        assert one.num_tokens > 70 and two.hashes[: len(one.hashes)] == one.hashes

    @pytest.mark.parametrize("apart", [{"model": "other"}, {"tools": [{"type": "function"}]}, {"cache_salt": "s"}])
    def test_what_keeps_prompts_apart(self, apart: dict[str, Any]) -> None:
        text = "word " * 60
        assert (
            key_of_body(body(inputs=text), {}, False).hashes[0]
            != key_of_body(body(inputs=text, **apart), {}, False).hashes[0]
        )

    def test_api_keys_count_where_caches_are_kept_apart_by_them(self) -> None:
        text = body(inputs="word " * 60)
        keys = [{b"authorization": b"Bearer a"}, {b"authorization": b"Bearer b"}]
        assert len({key_of_body(text, headers, True).hashes[0] for headers in keys}) == 2
        assert len({key_of_body(text, headers, False).hashes[0] for headers in keys}) == 1

    @pytest.mark.parametrize(
        "data", [b"", b"[]", b"{", b'{"inputs": "\xff"}', b'{"messages": 3}', b"[" * 9999, b'{"a":' * 9999]
    )
    def test_what_is_not_understood_has_no_prefix(self, data: bytes) -> None:
        assert key_of_body(data, {}, False).hashes == []


PAGES = {
    "a": '# HELP up Is it\n# TYPE up gauge\nup 1\n\n# TYPE took histogram\ntook_bucket{le="1"} 2\ntook_sum 3\n',
    "b": "# HELP up Is it\n# TYPE up gauge\nup 0\n\n# TYPE odd counter\nodd 5\n",
}


class TestMetricsText:
    def test_families_stay_together_with_one_head(self) -> None:
        assert metrics_text.join(PAGES).splitlines() == [
            "# HELP up Is it",
            "# TYPE up gauge",
            'up{replica="a"} 1',
            'up{replica="b"} 0',
            "",
            "# TYPE took histogram",
            'took_bucket{replica="a",le="1"} 2',
            'took_sum{replica="a"} 3',
            "",
            "# TYPE odd counter",
            'odd{replica="b"} 5',
        ]

    def test_engines_of_a_replica_are_told_apart(self) -> None:
        assert metrics_text.join({"a": '# TYPE up gauge\nup{replica="0",x="y"} 1\n'}).endswith(
            'up{replica="a/0",x="y"} 1\n'
        )

    def test_a_page_of_nobody_is_empty(self) -> None:
        assert metrics_text.join({}) == ""

    def test_sums(self) -> None:
        page = '# TYPE a gauge\na 2\na_more 7\nb{x="1"} 1.5\nb{x="2"} 2\n'
        assert metrics_text.sums(page, ("a", "b", "c")) == {"a": 2, "b": 3.5, "c": 0}


class TestHowMany:
    @pytest.mark.parametrize(
        ("queued", "usages", "wanted"),
        [
            ([0], [0.0], 0),  # idle
            ([0, 0], [0.5, 0.5], 2),  # as full as they should be
            ([1_000], [0.5], 2),  # and as much waits as one more would take
            ([5_000, 0], [1.0, 0.0], 7),
        ],
    )
    def test_wanted(self, queued: list[float], usages: list[float], wanted: float) -> None:
        assert wanted_replicas(queued, usages, 1_000, 0.5) == wanted

    def test_a_policy_keeps_what_there_is_until_replicas_report(self) -> None:
        policy = TokenPolicy(1_000, 0.5)
        context = SimpleNamespace(target_num_replicas=3, aggregated_metrics={})
        assert policy(context)[0] == 3
        context.aggregated_metrics = {"usage": {"a": 0.5}, "queued_tokens": {"a": 500.0}}
        assert policy(context)[0] == 1.5


class TestBooks:
    KEY = key_of_body(body(inputs="word " * 200), {}, False)

    def books(self) -> RoutingBooks:
        books = RoutingBooks()
        for name in ("a", "b"):
            books.update(name, {"address": f"http://{name}", "capacity_tokens": 10_000}, {})
        return books

    def test_who_holds_a_prompt_comes_first_until_it_has_too_much_to_do(self) -> None:
        books = self.books()
        books.end(books.place("b", self.KEY))
        assert books.rank(self.KEY, ["a", "b"])[0] == "b"
        books.update("b", {}, {"queued_tokens": 50_000})
        assert books.rank(self.KEY, ["a", "b"])[0] == "a"

    def test_who_is_not_ready_is_asked_last_of_all_and_holds_nothing(self) -> None:
        books = self.books()
        books.end(books.place("b", self.KEY))
        books.update("b", {}, {"ready": 0.0})
        assert books.rank(self.KEY, ["a", "b"]) == ["a"]
        assert books.rank(self.KEY, ["b"]) == ["b"]  # its word counts: nobody else is there
        books.update("b", {}, {"ready": 1.0})
        assert books.rank(self.KEY, ["a", "b"])[0] == "a"

    def test_who_is_gone_is_forgotten_and_tickets_for_it_may_end(self) -> None:
        books = self.books()
        ticket = books.place("b", self.KEY)
        books.keep(["a"])
        assert books.addresses == {"a": "http://a"}
        assert books.place("b", self.KEY) is None
        books.first_token(ticket)
        books.end(ticket)
        books.end(None)
