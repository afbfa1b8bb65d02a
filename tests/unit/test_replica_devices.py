"""Which devices each of several engines gets, and what is refused before anything is loaded."""

import pytest

from text_generation_inference.config import ServerConfig
from text_generation_inference.devices import shares, visible
from text_generation_inference.devices.driver import Driver, Gpu
from text_generation_inference.errors import StartError
from text_generation_inference.launch.arguments import build_parser, read_arguments


@pytest.fixture
def four_gpus(monkeypatch):
    driver = Driver((13, 0), [Gpu("H200", 1, (9, 0))] * 4)
    for module in (visible, shares):
        monkeypatch.setattr(module, "read_driver", lambda: driver)


def read(*arguments, **environment):
    return read_arguments(build_parser("p", "").parse_args(list(arguments)), environment).config


def cards(config, **environment):
    return [share.get("CUDA_VISIBLE_DEVICES") for share in shares.share_cards(config, environment)]


@pytest.mark.usefixtures("four_gpus")
def test_cards_are_shared_out_in_their_order():
    assert cards(ServerConfig(num_replicas=4)) == ["0", "1", "2", "3"]
    assert cards(ServerConfig(num_replicas=2, num_shard=2)) == ["0,1", "2,3"]
    assert cards(ServerConfig(num_replicas=3)) == ["0", "1", "2"]
    named = {"CUDA_VISIBLE_DEVICES": "GPU-a, 7,5,GPU-b"}
    assert cards(ServerConfig(num_replicas=2, num_shard=2), **named) == ["GPU-a,7", "5,GPU-b"]
    assert cards(ServerConfig()) == [None]
    assert cards(ServerConfig(num_replicas=2, device="cpu")) == [None, None]


def test_modules_of_gaudi(monkeypatch):
    config = ServerConfig(num_replicas=2, num_shard=2, device="hpu")
    chosen = shares.share_cards(config, {"HABANA_VISIBLE_MODULES": "4,5,6,7"})
    assert chosen == [{"HABANA_VISIBLE_MODULES": "4,5"}, {"HABANA_VISIBLE_MODULES": "6,7"}]
    monkeypatch.setattr(shares, "_MODULES", ("printf", "3\\n1\\n0\\n2\\n"))
    assert shares.share_cards(config, {}) == [{"HABANA_VISIBLE_MODULES": "0,1"}, {"HABANA_VISIBLE_MODULES": "2,3"}]


@pytest.mark.usefixtures("four_gpus")
def test_cards_that_are_counted_are_those_of_one_engine():
    assert read("--num-replicas", "4", CUDA_VISIBLE_DEVICES="0,1,2,3").num_shard == 1
    assert read("--num-replicas", "2", CUDA_VISIBLE_DEVICES="0,1,2,3").num_shard == 2
    assert read("--num-replicas", "2", "--sharded", "true").num_shard == 2


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--num-replicas 5", "takes 5 GPUs, but 4 can be seen: at most 4 fit"),
        ("--num-replicas 3 --num-shard 2", "each with 2 ranks, which takes 6 GPUs, but 4 can be seen: at most 2 fit"),
        ("--num-replicas 2 --num-shard 8", "`num_shard` is 8"),
        ("--num-replicas 0", "`num_replicas` must be >= 1"),
        ("--num-replicas 2 --nnodes 2 --num-shard 2 --master-addr a --rank-token b", "replicas are on one machine"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, words):
    with pytest.raises(StartError, match=words):
        read(*arguments.split())
