"""How many ranks a command line asks for: TGI's rules, torchrun's variables, machines, and what is refused."""

import pytest

from text_generation_inference.devices import visible
from text_generation_inference.devices.driver import Driver, Gpu
from text_generation_inference.errors import StartError
from text_generation_inference.launch import command
from text_generation_inference.launch.arguments import Launch, build_parser, read_arguments

MACHINES = ("--nnodes", "2", "--master-addr", "10.0.0.1", "--rank-token", "geheim")


def read(*arguments: str, **environment: str) -> Launch:
    return read_arguments(build_parser("launcher", "").parse_args(arguments), environment)


def error_of(*arguments: str, **environment: str) -> str:
    with pytest.raises(StartError) as caught:
        read(*arguments, **environment)
    return str(caught.value)


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visible, "read_driver", lambda: Driver((13, 0), [Gpu("H200", 1, (9, 0))] * 4))


@pytest.mark.parametrize(
    ("environment", "count"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "NVIDIA_VISIBLE_DEVICES": "0"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 1),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0, 1,1"}, 3),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c,MIG-GPU-1/2/3"}, 2),
        ({"NVIDIA_VISIBLE_DEVICES": "0,1,2"}, 3),
        ({"ZE_AFFINITY_MASK": "0,1"}, 2),
        ({"HABANA_VISIBLE_DEVICES": "0,1"}, None),
    ],
)
def test_items_are_counted_as_the_reference_did(environment: dict[str, str], count: int | None) -> None:
    assert visible.count_devices(environment) == count


def test_cards_of_gaudi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visible, "_count_gaudi", lambda: 8)
    on_gaudi = {"TGI_DEVICE": "hpu", "MODEL_ID": "org/large"}
    assert read("--num-shard", "2", **on_gaudi).config.num_shard == 2
    assert read("--sharded", "true", HABANA_VISIBLE_DEVICES="0,3", **on_gaudi).config.num_shard == 2
    assert read("--sharded", "true", HABANA_VISIBLE_MODULES="4,5,6,7", **on_gaudi).config.num_shard == 4
    assert read("--sharded", "true", HABANA_VISIBLE_DEVICES="all", **on_gaudi).config.num_shard == 8
    assert read("--sharded", "true", **on_gaudi).config.num_shard == 8
    # The image names all cards; one is used unless more are asked for, as ever.
    assert read(HABANA_VISIBLE_DEVICES="all", **on_gaudi).config.num_shard == 1
    assert "8 Gaudi cards can be seen" in error_of("--num-shard", "16", **on_gaudi)


@pytest.mark.parametrize(
    ("arguments", "environment", "num_shard"),
    [
        ("", {}, 1),  # GPUs that no variable names are not counted
        ("", {"CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        ("", {"CUDA_VISIBLE_DEVICES": ""}, 1),
        ("--sharded true", {"CUDA_VISIBLE_DEVICES": "0,1,2"}, 3),
        ("--sharded true", {}, 4),  # where the reference gave up, all that are there
        ("--sharded true --num-shard 2", {"CUDA_VISIBLE_DEVICES": "0,1,2"}, 2),
        ("--sharded false", {"CUDA_VISIBLE_DEVICES": "0,1"}, 1),
        ("--sharded false --num-shard 4", {}, 4),
        ("--num-shard 3", {"CUDA_VISIBLE_DEVICES": "0,1"}, 3),
        ("--device cpu", {"CUDA_VISIBLE_DEVICES": "0,1"}, 1),  # devices that nobody asked to use do not matter
        ("--device cpu --num-shard 7", {}, 7),
    ],
)
@pytest.mark.usefixtures("four_gpus")
def test_number_of_ranks(arguments: str, environment: dict[str, str], num_shard: int) -> None:
    launch = read(*arguments.split(), **environment)
    assert (launch.config.num_shard, launch.notes) == (num_shard, [])


@pytest.mark.usefixtures("four_gpus")
def test_too_few_cards() -> None:
    assert error_of("--sharded", "true", CUDA_VISIBLE_DEVICES="0").endswith("only found 1 CUDA devices")
    assert "`num_shard` is 8" in error_of("--num-shard", "8")
    assert "4 GPUs can be seen" in error_of("--num-shard", "8")
    assert read("--num-shard", "8", NCCL_MULTI_RANK_GPU_ENABLE="1").config.num_shard == 8
    assert read("--num-shard", "8", TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1").config.num_shard == 8
    assert read("--num-shard", "8", *MACHINES).config.num_shard == 8


def test_machines() -> None:
    config = read("--device", "cpu", "--node-rank", "1", *MACHINES).config
    assert (config.num_shard, config.nnodes, config.node_rank, config.master_port) == (2, 2, 1, 29500)
    assert "geheim" not in repr(config)
    assert read("--num-shard", "6", "--device", "cpu", *MACHINES).config.num_shard == 6
    assert "`num_shard` must be a multiple of `nnodes`" in error_of("--num-shard", "3", *MACHINES)
    assert "`num_shard` must be a multiple of `nnodes`" in error_of("--num-shard", "1", *MACHINES)
    assert "`rank_token` must be set" in error_of("--nnodes", "2", "--master-addr", "10.0.0.1")
    assert "`master_addr` must be the address" in error_of("--nnodes", "2", "--rank-token", "x")
    assert read("--master-addr", "10.0.0.1").notes == [
        "--master-addr has no effect: one machine serves the model; --nnodes N joins several"
    ]
    assert read("--expert-parallel").notes == ["--expert-parallel has no effect: one rank has all experts"]


def torchrun(rank: int, world: int, local_world: int | None, **more: str) -> dict[str, str]:
    given = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "400", **more}
    given |= {"RANK_TOKEN": "geheim", "TGI_DEVICE": "cpu"}
    if local_world is None:
        return given
    node = {"LOCAL_RANK": rank % local_world, "LOCAL_WORLD_SIZE": local_world, "GROUP_RANK": rank // local_world}
    return given | {name: str(value) for name, value in node.items()}


def test_torchrun() -> None:
    launch = read(**torchrun(6, 8, 4))
    config = launch.config
    assert (config.num_shard, config.nnodes, config.node_rank, launch.local_rank) == (8, 2, 1, 2)
    assert (config.master_addr, config.master_port) == ("10.0.0.1", 400)
    assert "GROUP_RANK=1" in launch.variables and "geheim" not in str(launch)
    # torchrun listens on the port that it names.
    assert read(**torchrun(0, 8, 4, TORCHELASTIC_USE_AGENT_STORE="True")).config.master_port == 401
    # One process on each machine, as Kubernetes has it.
    config = read(**torchrun(1, 2, None)).config
    assert (config.num_shard, config.nnodes, config.node_rank) == (2, 2, 1)
    # Whoever says more is asked first.
    config = read("--num-shard", "16", **torchrun(1, 2, 1)).config
    assert (config.num_shard, config.nnodes, config.node_rank) == (16, 2, 1)
    config = read(**torchrun(1, 2, 1, NUM_SHARD="4")).config
    assert (config.num_shard, config.nnodes) == (4, 2)
    one = read(**torchrun(0, 2, 2)).config
    assert (one.num_shard, one.nnodes, one.node_rank) == (2, 1, 0)
    assert read(RANK="1").config.num_shard == 1  # nothing says of how many


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"LOCAL_WORLD_SIZE": "3"}, "do not fit together"),
        ({"GROUP_RANK": "0"}, "do not fit together"),
        ({"WORLD_SIZE": "0"}, "do not fit together"),
        ({"RANK": "x"}, "environment variable RANK='x' is not valid: it must be a whole number"),
    ],
)
def test_variables_that_contradict_each_other(change: dict[str, str], error: str) -> None:
    assert error in error_of(**{**torchrun(6, 8, 4), **change})


def test_a_process_that_has_nothing_to_do_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in torchrun(1, 2, 2).items():
        monkeypatch.setenv(name, text)
    assert command.main([]) == 0
    assert "started by LOCAL_RANK=0" in capsys.readouterr().err
