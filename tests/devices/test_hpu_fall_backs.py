"""Ops that a Gaudi card leaves to the host, where each waits for the card and copies there and back: none while serving."""

import pytest
import torch
from driving import make_request, make_tiny, random_prompts, run, start
from gaudi import use_stand_in
from served_pictures import NUM_NEW, PROMPTS, check, serve

from text_generation_inference.kernels import routing

LIMITS = {"max_batch_size": 2, "max_total_tokens": 64, "max_batch_total_tokens": 1024}
WAYS = [{}, {"do_sample": True, "top_p": 0.9, "typical_p": 0.9, "repetition_penalty": 1.2}, {"top_n_tokens": 3}]


@pytest.fixture(scope="module")
def fall_backs(device_name: str):
    if device_name != "cpu":
        pytest.skip("the stand-in knows which ops a card has; `make test-hpu` reads the card's own count")
    use_stand_in()
    import habana_frameworks.torch  # noqa: F401
    from habana_frameworks.torch._bridge_ops import fall_backs

    return fall_backs


def test_what_a_card_does_not_do_is_counted(fall_backs):
    from habana_frameworks.torch.hpu.metrics import metric_global

    x = torch.arange(40.0).to("hpu")
    before = fall_backs()
    x[None].sort(dim=-1), x[None, :37].sort(dim=-1, stable=True), x + 1, x.sort()
    assert fall_backs() == before
    x[None].sort(dim=-1, stable=True)
    x.sort(stable=True)
    x.double()
    torch.special.i0(x)
    found = {name: calls - before.get(name, 0) for name, calls in fall_backs().items()}
    assert {name for name, calls in found.items() if calls} == {
        "aten::sort.values_stable(long_and_stable)(i64, f32)",
        "aten::copy_(f32, f64)",
        "aten::i0.out(f32)",
    }
    stats = dict(metric_global("cpu_fallback").stats())
    assert stats["TotalNumber"] == sum(fall_backs().values()) > 0
    assert "aten::i0" in stats["FallbackOps"]


# Experts: more of them than a stable sort takes, and those that the card's own op does not know; norms; windows; slopes.
MODELS = {
    "Mixtral": {"num_local_experts": 40},
    "DeepseekV3": {},
    "GptOss": {},
    "GPTNeoX": {},
    "Bloom": {},
    "Gemma3": {},
}


@pytest.mark.parametrize("architecture", MODELS)
def test_nothing_falls_back_to_the_host(fall_backs, architecture, tmp_path):
    folder = make_tiny(architecture, MODELS[architecture], tmp_path).folder
    prompts = random_prompts(200, [5, 40, 17], seed=1)
    asked = [make_request(n, prompts[n], 4, seed=n, **WAYS[n]) for n in range(3)]
    plain = start(folder, device="cpu", custom_kernels=False, **LIMITS)
    expected = [output.token_ids for output in run(plain, asked)]
    plain.close()
    before = fall_backs()
    engine = start(folder, device="hpu", warmup_enabled=False, **LIMITS)
    found = [output.token_ids for output in run(engine, asked)]
    engine.close()
    assert found == expected
    assert fall_backs() == before


@pytest.mark.parametrize(
    "family", ["llava_next", "idefics3", "qwen2_5_vl", "qwen3_vl", "pixtral", "mistral3", "idefics2", "mllama"]
)
def test_nothing_falls_back_for_pictures(fall_backs, family, tmp_path):
    """Towers, and whoever reads what they make; while they start neither."""
    served = serve(family, tmp_path)
    longest = max(len(served.oracle.ids(prompt)) for prompt in PROMPTS)
    limits = {"max_total_tokens": longest + NUM_NEW, "max_batch_size": 2, "max_images_per_request": 5}
    before = fall_backs()
    engine = served.start(device="hpu", max_input_tokens=longest, **limits, bucket_strategy="linear")
    if family == "mllama":  # which makes some things once for all pictures
        before = fall_backs()
    check(served, run(engine, [served.request(number, prompt) for number, prompt in enumerate(PROMPTS)]))
    engine.close()
    assert fall_backs() == before


@pytest.mark.parametrize("count", [1, 4, 8])
def test_the_best_of_many_experts(fall_backs, count):
    """In the order of a stable sort: the lower number first among equals, of which there are many."""
    generator = torch.Generator().manual_seed(count)
    for values in (
        torch.rand(50, 64, generator=generator),
        torch.randint(0, 5, (50, 64), generator=generator).float(),
        torch.zeros(3, 64),
        torch.full((2, 64), -torch.inf).index_fill(1, torch.tensor([5, 60]), 1.0),
    ):
        expected = routing.choose_best(values, count)
        found = routing.choose_best(values.to("hpu"), count)
        assert [part.tolist() for part in found] == [part.tolist() for part in expected]
    broken = torch.rand(2, 64, generator=generator)
    broken[0, 7] = torch.nan
    ids = routing.choose_best(broken.to("hpu"), count)[0].tolist()
    assert ids[1] == routing.choose_best(broken, count)[0][1].tolist(), "a broken row breaks no other"
    assert all(0 <= number < 64 for number in ids[0])
