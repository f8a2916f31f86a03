"""What this node holds: by id, by alias, for a time and within bytes."""

from chiasm.embedding_cache import ENTRY_BYTES
from llm_service.holding.memory import MAX_ALIASES, MemoryStore
from llm_service.holding.values import Binding, new_id
from tests.llm_service.holding.rig import COUNT, WIDTH, Clock, rows

EACH = ENTRY_BYTES + COUNT * WIDTH * 4


def store(
    capacity: int = 100 * EACH, seconds: float = 60.0
) -> tuple[MemoryStore, Clock, list[str]]:
    clock, dropped = Clock(), list[str]()
    return MemoryStore(seconds, capacity, dropped.append, clock), clock, dropped


def test_an_id_has_256_random_bits_and_fits_a_url() -> None:
    ids = {new_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(len(id) == len("emb_") + 43 and id.startswith("emb_") for id in ids)


def test_what_was_put_is_found_by_its_tenant_alone() -> None:
    memory, _, _ = store()
    held = memory.put("a", rows(1))
    found = memory.get("a", held.id)
    assert found is not None
    assert found.rows is held.rows
    assert memory.get("b", held.id) is None
    assert memory.get("", held.id) is None


def test_the_same_rows_keep_their_id_within_a_tenant_and_get_a_new_age() -> None:
    memory, clock, _ = store()
    first = memory.put("a", rows(1))
    clock.now += 40
    again = memory.put("a", rows(1))
    assert again.id == first.id
    assert again.expires_at == first.expires_at + 40
    assert memory.put("b", rows(1)).id != first.id
    assert memory.put("a", rows(2)).id != first.id
    clock.now += 40
    assert memory.get("a", first.id) is not None
    assert len(memory) == 3


def test_rows_of_unknown_origin_never_pass_for_checked_ones() -> None:
    memory, _, _ = store()
    unknown = memory.put("a", rows(1, checked=False))
    known = memory.put("a", rows(1))
    assert unknown.id != known.id


def test_an_entry_leaves_at_its_age_whether_it_was_used_or_not() -> None:
    memory, clock, dropped = store(seconds=60)
    held = memory.put("a", rows(1))
    clock.now += 59.9
    assert memory.get("a", held.id) is not None
    clock.now += 0.1
    assert memory.get("a", held.id) is None
    assert memory.byte_count == 0
    assert dropped == ["age"]


def test_the_oldest_leave_for_room_and_the_count_of_bytes_stays_true() -> None:
    memory, _, dropped = store(capacity=3 * EACH)
    held = [memory.put("a", rows(seed)) for seed in range(10)]
    assert [memory.get("a", one.id) is not None for one in held] == [False] * 7 + [True] * 3
    assert memory.byte_count == 3 * EACH
    assert dropped == ["room"] * 7


def test_what_is_larger_than_all_room_is_not_held_and_drives_nothing_out() -> None:
    memory, _, dropped = store(capacity=EACH - 1)
    held = memory.put("a", rows(1))
    assert not memory.holds("a", held.id)
    assert (memory.byte_count, dropped) == (0, [])


def test_an_entry_given_up_for_room_gets_a_new_id_when_it_comes_again() -> None:
    memory, _, _ = store(capacity=EACH)
    first = memory.put("a", rows(1))
    memory.put("a", rows(2))
    again = memory.put("a", rows(1))
    assert again.id != first.id
    assert memory.get("a", first.id) is None


def test_an_alias_is_the_tenants_own_and_expires() -> None:
    memory, clock, _ = store(seconds=60)
    memory.bind("a", "cat", Binding("emb_1", b"rows"))
    assert memory.named("a", "cat") == Binding("emb_1", b"rows")
    assert memory.named("b", "cat") is None
    clock.now += 60
    assert memory.named("a", "cat") is None


def test_aliases_are_bounded_and_the_oldest_leave() -> None:
    memory, _, _ = store()
    for number in range(MAX_ALIASES + 2):
        memory.bind("a", str(number), Binding("emb_1", b"rows"))
    assert memory.named("a", "1") is None
    assert memory.named("a", "2") is not None


def test_bindings_agree_by_file_or_else_by_rows() -> None:
    known = Binding("emb_1", b"rows", b"file")
    assert known.agrees(Binding("emb_2", b"other", b"file"))
    assert not known.agrees(Binding("emb_1", b"rows", b"else"))
    assert known.agrees(Binding("emb_2", b"rows"))
    assert not known.agrees(Binding("emb_1", b"other"))
