"""What cache is granted, refused and explained, over invented machines and models."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe.errors import MemoryBudgetError, UsageError
from bmoe.experts.budget import CacheRequest, ModelSizes, advice, decide, parse_cache_mb
from bmoe.host.memory import CgroupLimit, MemoryFacts

MiB = 1 << 20

# Numbers that tell by themselves where they went.
QWEN = ModelSizes(
    dense=2100 * MiB,
    kv=96 * MiB,
    compute=301 * MiB,
    recurrent=4 * MiB,
    experts=17300 * MiB,
    working_set=1080 * MiB,
    smallest=40 * MiB,
    ring=30 * MiB,
)
LAPTOP = MemoryFacts(mem_total=16000 * MiB, mem_available=8123 * MiB)
SERVER = MemoryFacts(mem_total=64000 * MiB, mem_available=60000 * MiB)


def capped(limit_mb: int, usage_mb: int = 0, facts: MemoryFacts = SERVER) -> MemoryFacts:
    return replace(facts, limits=(CgroupLimit("/x", 1, limit_mb * MiB, usage_mb * MiB, 0),))


def refusal(request: CacheRequest, facts: MemoryFacts, sizes: ModelSizes = QWEN, already_resident: int = 0) -> str:
    with pytest.raises(MemoryBudgetError) as caught:
        decide(request, sizes, facts, already_resident)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- auto ---


def test_auto_takes_what_the_machine_leaves() -> None:
    decision = decide(CacheRequest(), QWEN, LAPTOP)
    assert decision.budget == (8123 - 1536 - 2100 - 96 - 301 - 4) * MiB
    assert decision.explain() == (
        "cache: auto 4086 MiB = 8123 available (MemAvailable) - 1536 floor - 2100 dense - 96 KV - 301 compute"
        " - 4 recurrent; all experts 17300 MiB; one token routes 1080 MiB"
    )


def test_auto_under_a_small_limit_leaves_an_eighth_of_it() -> None:
    decision = decide(CacheRequest(), replace(QWEN, dense=500 * MiB), capped(2500, usage_mb=20))
    assert decision.budget == (2480 - 312 - 500 - 96 - 301 - 4) * MiB
    assert "2480 available (cgroup /x) - 312 floor (1/8 of 2500)" in decision.explain()


def test_a_small_machine_has_a_small_floor() -> None:
    small = MemoryFacts(mem_total=4000 * MiB, mem_available=3900 * MiB)
    decision = decide(CacheRequest(force=True), replace(QWEN, dense=0), small)
    assert decision.budget == (3900 - 500 - 96 - 301 - 4) * MiB


def test_a_small_floor_under_a_limit_does_not_take_the_machines_own() -> None:
    # The cgroup has the least room, but after the floors the machine has less.
    busy = MemoryFacts(mem_total=64000 * MiB, mem_available=6000 * MiB)
    decision = decide(CacheRequest(), QWEN, capped(5900, facts=busy))
    assert decision.budget == (6000 - 1536 - 2501) * MiB
    assert "(MemAvailable)" in decision.explain()


def test_any_other_floor_is_taken_as_it_is() -> None:
    assert decide(CacheRequest(floor_mb=0), QWEN, LAPTOP).budget == (8123 - 2501) * MiB
    assert decide(CacheRequest(floor_mb=4000), QWEN, LAPTOP).budget == (8123 - 4000 - 2501) * MiB
    decision = decide(CacheRequest(floor_mb=2000), replace(QWEN, dense=0), capped(3600))
    assert decision.budget == (3600 - 2000 - 401) * MiB


def test_what_is_already_resident_is_not_subtracted_twice() -> None:
    fresh = decide(CacheRequest(), QWEN, LAPTOP)
    # The same machine after the KV cache and the compute buffers were allocated.
    taken = 397 * MiB
    later = replace(LAPTOP, mem_available=LAPTOP.mem_available - taken)
    decision = decide(CacheRequest(), QWEN, later, already_resident=taken)
    assert decision.budget == fresh.budget
    assert "+ 397 already resident" in decision.explain()
    # More than the model takes is somebody else's: it buys nothing.
    assert decide(CacheRequest(), QWEN, LAPTOP, 2501 * MiB) == decide(CacheRequest(), QWEN, LAPTOP, 1 << 50)


def test_auto_stops_at_all_experts_to_the_byte() -> None:
    tiny = ModelSizes(dense=3, kv=1, compute=1, recurrent=0, experts=7 * MiB // 2, working_set=7 * MiB // 2)
    decision = decide(CacheRequest(), tiny, LAPTOP)
    assert decision.budget == 7 * MiB // 2
    assert decision.explain().startswith("cache: auto 4 MiB (all experts), of 6584 left = 8123 available")


def test_the_ceiling_caps_every_mode() -> None:
    for request in (CacheRequest(ceil_mb=2000), CacheRequest("fixed", 3000, ceil_mb=2000)):
        decision = decide(request, QWEN, LAPTOP)
        assert decision.budget == 2000 * MiB
        assert "2000 MiB (capped by --cache-ceil-mb 2000), of" in decision.explain()
    assert decide(CacheRequest(ceil_mb=5000), QWEN, LAPTOP) == decide(CacheRequest(), QWEN, LAPTOP)


def test_auto_refuses_less_than_one_layer_routes_and_says_what_to_do() -> None:
    sizes = replace(QWEN, smallest=1070 * MiB)
    message = refusal(CacheRequest(), capped(4000), sizes)
    assert "--cache-mb auto is 71 MiB short: one layer's routed experts and the reads under way take 1070" in message
    assert "999 MiB is left (4000 available (cgroup /x) - 500 floor (1/8 of 4000)" in message
    for option in ("--cache-mb 0", "-c", "--force-cache"):
        assert option in message
    # Exactly as much more as it asked for is enough.
    more = replace(sizes, dense=QWEN.dense - 71 * MiB)
    assert decide(CacheRequest(), more, capped(4000)).budget == 1070 * MiB


def test_auto_with_nothing_left_counts_what_is_missing_below_zero() -> None:
    message = refusal(CacheRequest(), capped(2000))
    assert f"{40 + 2501 - 1750} MiB short" in message
    assert "nothing is left" in message


def test_auto_forced_takes_whatever_is_left() -> None:
    decision = decide(CacheRequest(), QWEN, capped(4000))
    assert decision.budget == 999 * MiB
    assert "999 MiB (below one token's routed experts)" in decision.explain()
    sizes = replace(QWEN, smallest=1070 * MiB)
    assert "999 MiB (forced, below one" in decide(CacheRequest(force=True), sizes, capped(4000)).explain()
    assert decide(CacheRequest(force=True), QWEN, capped(2000)).budget == 0


def test_a_ceiling_below_one_layer_is_named_as_the_cause() -> None:
    assert refusal(CacheRequest(ceil_mb=39), LAPTOP).startswith("--cache-ceil-mb 39 is too small")
    assert decide(CacheRequest(ceil_mb=40), QWEN, LAPTOP).budget == 40 * MiB
    assert decide(CacheRequest(ceil_mb=7, force=True), QWEN, LAPTOP).budget == 7 * MiB


def test_a_model_without_routed_experts_gets_no_cache_and_no_refusal() -> None:
    dense = replace(QWEN, experts=0, working_set=0, smallest=0)
    assert decide(CacheRequest(), dense, capped(2000)).budget == 0
    assert decide(CacheRequest("fixed", 100), dense, LAPTOP).budget == 0


# --- fixed and off ---


def test_fixed_gets_what_it_asked_for_with_no_floor() -> None:
    decision = decide(CacheRequest("fixed", 5600), QWEN, LAPTOP)
    assert decision.budget == 5600 * MiB
    assert decision.explain().startswith(
        "cache: fixed 5600 MiB, of 5622 left = 8123 available (MemAvailable) - 2100 dense"
    )
    assert "floor" not in decision.explain()


def test_fixed_below_one_layer_is_refused_with_the_smallest_that_would_do() -> None:
    sizes = replace(QWEN, smallest=39 * MiB + 1)
    message = refusal(CacheRequest("fixed", 39), LAPTOP, sizes)
    assert "--cache-mb 39 is too small" in message
    assert "the smallest that would do is 40 (" in message
    assert decide(CacheRequest("fixed", 40), sizes, LAPTOP).budget == 40 * MiB
    forced = decide(CacheRequest("fixed", 39, force=True), sizes, LAPTOP)
    assert forced.budget == 39 * MiB
    assert "forced" in forced.explain()


def test_fixed_below_one_layer_where_one_layer_does_not_fit_says_both() -> None:
    assert "the smallest that would do is 600, though only 499 fits" in refusal(
        CacheRequest("fixed", 100), capped(3000), replace(QWEN, smallest=600 * MiB)
    )


@pytest.mark.parametrize(
    ("mb", "says"),
    [
        (1080, ""),
        (1079, "is below the 1080 MiB that one token routes: expect 25 to 42 % hits in decode"),
        (555, "expect 17 to 27 % hits in decode, as recorded routes of three models have at this share"),
        (135, "expect 5 to 8 %"),
        (200, "expect 7 to 12 %"),
        (40, "expect 0 to 1 %"),
    ],
)
def test_below_one_token_there_is_advice_with_the_hit_rate_to_expect(mb: int, says: str) -> None:
    decision = decide(CacheRequest("fixed", mb), QWEN, LAPTOP)
    assert decision.budget == mb * MiB
    assert says in advice(decision, "votes")
    assert bool(says) == bool(advice(decision, "votes")) == bool(advice(decision, "lru"))
    assert "\n" not in advice(decision, "votes")
    assert not says or "no hits at all from --cache-policy lru" in advice(decision, "lru")


def test_advice_where_there_is_nothing_beside_the_ring_and_where_there_is_no_cache() -> None:
    assert "expect no hits at all" in advice(decide(CacheRequest("fixed", 30, force=True), QWEN, LAPTOP), "votes")
    assert advice(decide(CacheRequest("off"), QWEN, LAPTOP), "votes") == ""
    assert advice(decide(CacheRequest(), QWEN, LAPTOP), "votes") == ""


def test_fixed_that_does_not_fit_is_refused_with_the_largest_that_does() -> None:
    message = refusal(CacheRequest("fixed", 5623), LAPTOP)
    assert "--cache-mb 5623 does not fit" in message
    assert message.endswith("the largest that fits is 5622")
    assert decide(CacheRequest("fixed", 5622), QWEN, LAPTOP).budget == 5622 * MiB
    # Force cannot make memory.
    assert refusal(CacheRequest("fixed", 5623, force=True), LAPTOP) == message
    # Neither the largest that fits nor any other number would do.
    message = refusal(CacheRequest("fixed", 5623), capped(3000))
    assert message.endswith("the largest that fits is 499")
    message = refusal(CacheRequest("fixed", 5623), capped(3000), replace(QWEN, smallest=600 * MiB))
    assert "the largest that fits is 499, and one layer's routed experts take 600; use --cache-mb 0" in message


def test_fixed_above_all_experts_is_clipped_before_it_is_refused() -> None:
    decision = decide(CacheRequest("fixed", 99999), QWEN, SERVER)
    assert decision.budget == 17300 * MiB
    assert "fixed 17300 MiB (99999 clipped to all experts)" in decision.explain()


@pytest.mark.parametrize("request_", [CacheRequest("off"), CacheRequest("fixed", 0)])
def test_off_is_always_allowed(request_: CacheRequest) -> None:
    for facts in (LAPTOP, capped(1), MemoryFacts(0, 0)):
        decision = decide(request_, QWEN, facts)
        assert decision.budget == 0
        assert decision.explain() == (
            "cache: off, experts are streamed with no cache; all experts 17300 MiB; one token routes 1080 MiB"
        )


# --- the flag ---


@pytest.mark.parametrize(
    ("text", "pieces"),
    [("auto", ("auto", None)), ("0", ("off", None)), ("000", ("off", None)), ("1500", ("fixed", 1500))],
)
def test_cache_mb_is_parsed(text: str, pieces: tuple[str, int | None]) -> None:
    assert parse_cache_mb(text) == pieces


@pytest.mark.parametrize(
    "text", ["", "-1", "+5", "1.5", "1e3", "1_000", " 5", "5\n", "4G", "Auto", "none", "٣", "9" * 5000]
)
def test_anything_else_is_refused_in_one_line_that_names_the_flag(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--cache-mb: ") as caught:
        parse_cache_mb(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flag", "arguments"),
    [
        ("--cache-mb", {"mode": "fixed"}),
        ("--cache-mb", {"mode": "fixed", "mb": -1}),
        ("--cache-floor-mb", {"floor_mb": -1}),
        ("--cache-ceil-mb", {"ceil_mb": 0}),
    ],
)
def test_a_request_that_makes_no_sense_names_its_flag(flag: str, arguments: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=f"^{flag}: "):
        CacheRequest(**arguments)  # type: ignore[arg-type]


# --- over all machines and models ---

relaxed = settings(deadline=None)  # the machine may be busy


def sizes_up_to(most: int) -> st.SearchStrategy[int]:
    """Bytes, up to about `most` MiB, large ones as often as small ones: whole MiB, and some more or less."""
    return st.builds(
        lambda n, odd: max(0, n * MiB + odd), st.integers(0, most), st.sampled_from([0, 0, -1, 1, MiB // 2])
    )


some_bytes = sizes_up_to(6000)


@st.composite
def models(draw: st.DrawFn) -> ModelSizes:
    experts = draw(sizes_up_to(20000))
    dense, kv, compute, recurrent = (draw(sizes_up_to(2000)) for _ in range(4))
    token = experts * draw(st.integers(0, 100)) // 100
    return ModelSizes(dense, kv, compute, recurrent, experts, token, token * draw(st.integers(0, 100)) // 100)


@st.composite
def machines(draw: st.DrawFn) -> MemoryFacts:
    total = 1 + draw(sizes_up_to(64000))
    limit = st.builds(CgroupLimit, st.just("/x"), st.just(2), sizes_up_to(64000), some_bytes, some_bytes)
    available = total * draw(st.integers(0, 100)) // 100
    return MemoryFacts(total, available, tuple(draw(st.lists(limit, max_size=3))))


requests = st.builds(
    CacheRequest,
    mode=st.sampled_from(["auto", "fixed", "off"]),
    mb=st.integers(0, 25000),
    floor_mb=st.sampled_from([1536, 0, 100, 5000]),
    ceil_mb=st.none() | st.integers(1, 25000),
    force=st.booleans(),
)


def granted(request: CacheRequest, sizes: ModelSizes, facts: MemoryFacts, resident: int) -> int | None:
    try:
        return decide(request, sizes, facts, resident).budget
    except MemoryBudgetError:
        return None


@relaxed
@given(requests, models(), machines(), some_bytes)
def test_a_budget_is_within_every_bound(
    request: CacheRequest, sizes: ModelSizes, facts: MemoryFacts, resident: int
) -> None:
    budget = granted(request, sizes, facts, resident)
    if budget is None:
        return
    costs = max(0, sizes.dense + sizes.kv + sizes.compute + sizes.recurrent - resident)
    assert 0 <= budget <= sizes.experts
    assert budget == 0 or budget <= facts.available() - costs
    assert budget % MiB == 0 or budget == sizes.experts
    assert request.ceil_mb is None or budget <= request.ceil_mb * MiB
    assert request.mode != "fixed" or budget <= (request.mb or 0) * MiB


@relaxed
@given(requests, models(), machines(), some_bytes)
def test_refused_if_and_only_if_below_one_layer_or_beyond_the_room(
    request: CacheRequest, sizes: ModelSizes, facts: MemoryFacts, resident: int
) -> None:
    budget = granted(request, sizes, facts, resident)
    forced = granted(replace(request, force=True), sizes, facts, resident)
    if request.mode == "off" or (request.mode == "fixed" and request.mb == 0):
        assert budget == forced == 0
    elif forced is None:  # force overrules the usefulness, never the room
        assert request.mode == "fixed"
        assert budget is None
        wanted = min((request.mb or 0) * MiB, sizes.experts, (request.ceil_mb or 1 << 30) * MiB)
        costs = max(0, sizes.dense + sizes.kv + sizes.compute + sizes.recurrent - resident)
        assert wanted > facts.available() - costs - 6 * MiB  # six roundings to a MiB
    elif request.force:
        assert budget == forced
    else:
        assert (budget is None) == (forced < sizes.smallest)
        assert budget in (None, forced)


@relaxed
@given(requests, models(), machines(), some_bytes, some_bytes, st.integers(0, 3))
def test_more_memory_never_gives_a_smaller_cache(
    request: CacheRequest, sizes: ModelSizes, facts: MemoryFacts, resident: int, more: int, which: int
) -> None:
    if which == 0 or which > len(facts.limits):
        roomier = replace(facts, mem_available=min(facts.mem_total, facts.mem_available + more))
    else:
        limits = list(facts.limits)
        limit = limits[which - 1]
        limits[which - 1] = replace(limit, usage=max(0, limit.usage - more))
        if limits[which - 1].room() < limit.room():  # less usage may leave less page cache to give back
            return
        roomier = replace(facts, limits=tuple(limits))
    before = granted(request, sizes, facts, resident)
    after = granted(request, sizes, roomier, resident)
    if before is not None:
        assert after is not None
        assert after >= before


def test_the_number_that_a_refusal_names_is_granted() -> None:
    """Where none would do, it says what does without."""
    seen = Counter[str]()

    @relaxed
    @given(models(), sizes_up_to(8000), some_bytes, st.integers(1, 16000))
    def holds(sizes: ModelSizes, room: int, resident: int, mb: int) -> None:
        costs = max(0, sizes.dense + sizes.kv + sizes.compute + sizes.recurrent - resident)
        facts = MemoryFacts(64000 * MiB, costs + room)
        try:
            decide(CacheRequest("fixed", mb), sizes, facts, resident)
        except MemoryBudgetError as error:
            message = str(error)
        else:
            return
        if named := re.search(r"(would do is|that fits is) (\d+)( \(|$)", message):
            seen[named[1]] += 1
            assert decide(CacheRequest("fixed", int(named[2])), sizes, facts, resident).budget > 0
        else:
            seen["none"] += 1
            assert "--cache-mb 0" in message or "(0 streams with no cache" in message

    holds()
    assert len(seen) == 3, seen


@relaxed
@given(requests, models(), machines(), some_bytes)
def test_the_printed_line_adds_up(request: CacheRequest, sizes: ModelSizes, facts: MemoryFacts, resident: int) -> None:
    try:
        decision = decide(request, sizes, facts, resident)
    except MemoryBudgetError:
        return
    line = decision.explain()
    assert "\n" not in line
    if decision.mode == "off":
        return
    left, right = line.split(";")[0].split(" = ")
    terms = re.findall(r"([-+]?) ?\b(\d+) [a-zK]", re.sub(r"\(.*?\)", "", right))
    total = sum(int(sign + number) for sign, number in terms)
    stated = re.search(r", of (-?\d+) left$", left)
    if stated:
        assert int(stated[1]) == total
    else:
        assert decision.budget == total * MiB
