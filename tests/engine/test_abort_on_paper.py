"""A request may be aborted anywhere: waiting, awaiting rows, in its prompt, healing, decoding, arrived, handed over,
between plan and commit. Everything it had is free again, it ends once, and nobody else notices."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from epd.engine.plan import Failure
from epd.engine.sequence import Sequence
from epd.types import FinishReason, GenerateRequest, MediaSpan, Role
from tests.engine.conftest import make_request
from tests.engine.paper import PEER, Paper, make_paper, text_ref

STEM = [(5 * i * i + i) % 120 for i in range(120)]
NUM_ROWS = 9
met: Counter[str] = Counter()

actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.sampled_from([3, 8, 17, 40, 60])),
        st.tuples(st.just("media"), st.sampled_from([20, 40])),
        st.tuples(st.just("arrive"), st.sampled_from([3, 17, 40])),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("abort"), st.integers(0, 7)),
        st.tuples(st.just("abort"), st.integers(0, 7)),
        st.tuples(st.just("abort"), st.integers(0, 7)),
        st.tuples(st.just("step fails"), st.just(0)),
        st.tuples(st.just("evict"), st.sampled_from([2, 1000])),
        st.tuples(st.just("rows come"), st.just(0)),
        st.tuples(st.just("gateway dies"), st.just(0)),
    ),
    min_size=5,
    max_size=25,
)


def media_request(paper: Paper, request_id: str, length: int) -> GenerateRequest:
    ref = text_ref(paper.rows, "medium", NUM_ROWS, seed=1)
    span = MediaSpan(start=length - NUM_ROWS - 2, stop=length - 2, key=ref.key, row_start=0, media=0)
    return make_request(request_id, STEM[:length], max_tokens=6, ignore_eos=True, spans=(span,), embeddings=(ref,))


def where(paper: Paper, sequence: Sequence) -> str:
    roster = paper.scheduler._roster
    if sequence.request_id in roster.running:
        return "healing" if sequence.is_healing else "decoding" if sequence.is_decoding else "prompt"
    if any(arrived.sequence is sequence for arrived in roster.arrived):
        return "arrived"
    return "awaiting" if sequence.request_id in roster.waiting._awaiting else "waiting"


def abort(paper: Paper, number: int) -> None:
    living = [sequence.request_id for sequence in paper.scheduler._roster]
    request_id = living[number % len(living)] if living else "nobody"
    sequence = paper.scheduler._roster.find(request_id)
    if sequence is not None:
        met[where(paper, sequence)] += 1
    paper.scheduler.abort(request_id)
    paper.collect()
    assert request_id not in paper.scheduler


def play(paper: Paper, script: list[tuple[str, int]], *, decode_address: str | None) -> set[str]:
    """Returns the requests that a gateway took with it when it died: nobody is told of their end."""
    untold: set[str] = set()
    is_decode = paper.scheduler._config.role is Role.DECODE
    for action, value in script:
        request_id = f"r{len(paper.requests)}"
        if action == "submit" and not is_decode:
            request = make_request(request_id, STEM[:value], max_tokens=6, ignore_eos=True)
            paper.submit(request, decode_address=decode_address)
        elif action == "media" and not is_decode:
            paper.submit(media_request(paper, request_id, value), decode_address=decode_address)
        elif action == "arrive" and is_decode:
            paper.submit_transfer(make_request(request_id, STEM[:value], max_tokens=6, ignore_eos=True))
        elif action == "step":
            for _ in range(value):
                paper.step()
        elif action == "abort":
            abort(paper, value)
        elif action == "step fails":
            # A step whose forward raised: the loop ends its requests instead of committing it.
            paper.begin_step()
            planned = [id_ for id_ in paper.plan.request_ids if id_ in paper.scheduler]
            met["mid-step"] += len(planned)
            paper.scheduler.fail(paper.plan.request_ids, Failure(500, "step_failed", "it did"))
            paper.collect()
        elif action == "evict":
            paper.cache.device._ledger.evict_window(value)
        elif action == "rows come":
            paper.rows.arrive()
        elif action == "gateway dies":
            untold |= {sequence.request_id for sequence in paper.scheduler._roster}
            paper.scheduler.drop_peer(PEER)
            paper.collect()
        paper.cache.check()
    while not paper.scheduler.is_idle:
        paper.rows.arrive()
        paper.step()
    return untold


def check(paper: Paper, untold: set[str], *, hands_over: bool) -> None:
    paper.assert_nothing_leased()
    for request_id in paper.requests:
        finish, answer = paper.finishes.get(request_id), paper.answers.get(request_id, [])
        truth = paper.truth(request_id)
        assert answer == truth[: len(answer)]
        if finish is None:
            # The decode worker goes on from here, or there is nobody to be told.
            assert request_id in untold or (hands_over and len(answer) == 1)
        elif finish.reason is FinishReason.LENGTH:
            assert answer == truth
        else:
            assert finish.reason in (FinishReason.CANCELLED, FinishReason.FAILED)


@settings(max_examples=250, deadline=None)
@given(actions, st.booleans(), st.sampled_from([(18, 22), (200, 200)]), st.sampled_from([4, 16]), st.booleans())
def test_one_worker(
    script: list[tuple[str, int]], is_slow: bool, pages: tuple[int, int], chunk_tokens: int, loses_windows: bool
) -> None:
    paper = make_paper(num_full_pages=pages[0], num_window_pages=pages[1], chunk_tokens=chunk_tokens, max_running=3)
    paper.rows.is_slow = is_slow
    begins = [("submit", 60), ("step", 24), ("evict", 1000), ("submit", 60), ("step", 1)] if loses_windows else []
    untold = play(paper, [*begins, *script], decode_address=None)
    check(paper, untold, hands_over=False)


@settings(max_examples=80, deadline=None)
@given(actions, st.booleans())
def test_prefill_worker(script: list[tuple[str, int]], is_slow: bool) -> None:
    paper = make_paper(num_full_pages=20, num_window_pages=24, max_running=3, role=Role.PREFILL)
    paper.rows.is_slow = is_slow
    untold = play(paper, script, decode_address="decode")
    check(paper, untold, hands_over=True)


@settings(max_examples=80, deadline=None)
@given(actions)
def test_decode_worker(script: list[tuple[str, int]]) -> None:
    paper = make_paper(num_full_pages=20, num_window_pages=24, max_running=2, role=Role.DECODE)
    untold = play(paper, script, decode_address=None)
    check(paper, untold, hands_over=False)


def test_every_place_was_met() -> None:
    """Of the schedules above: each kind of place has seen an abort."""
    places = ("waiting", "awaiting", "prompt", "healing", "decoding", "arrived", "mid-step")
    assert not met or all(met[place] for place in places), met
