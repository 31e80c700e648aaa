"""Adding files to a data set: splits by content, dropped records, atomicity and permissions."""

import errno
import itertools
import json
import os
import signal
import stat
import sys
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from device_agent.datasets.build import MAX_RECORD_BYTES, Addition, FieldMap, SeenDigests, add, append_record
from device_agent.datasets.formats import open_source
from device_agent.datasets.splits import SPLITS, SplitRule, record_bytes
from device_agent.datasets.store import DatasetStore
from shared.errors import BadRequest, Conflict, InvalidDataset, MobizoError, NotFound, TooLarge
from shared.task import Task
from shared.task_templates import named_task

TASK = named_task("sst2")
ROWS = [(f"the film {number} is warm", number % 2) for number in range(100)]


@pytest.fixture
def store(tmp_path):
    return DatasetStore(tmp_path / "data")


@pytest.fixture
def source(tmp_path):
    """Writes a CSV file of rows (text, label)."""

    def source(rows=ROWS, name="a.csv"):
        path = tmp_path / name
        path.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
        return open_source(path, None, ",", None)

    return source


def content(directory):
    return {path.name: path.read_bytes() for path in directory.glob("*.jsonl")}


def records(store, name="a"):
    return {split: [record for _, record in store.records(name, split)] for split in store.about(name).records}


values = st.one_of(
    st.text(st.characters(codec="utf-8")),
    st.integers(),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False, allow_infinity=False),
)
rows = st.lists(st.dictionaries(st.sampled_from(["text", "label", "é"]), values, min_size=1), min_size=1, max_size=40)


@settings(max_examples=25, deadline=None)
@given(rows=rows, seed=st.integers(0, 2**32 - 1), data=st.data())
def test_a_record_has_one_split_whatever_is_added_with_it(tmp_path_factory, rows, seed, data):
    directory = tmp_path_factory.mktemp("split")
    store, rule = DatasetStore(directory / "data"), SplitRule((50, 30, 20), seed)
    order = data.draw(st.permutations(rows + rows))
    for name, dataset_rows in (("a", rows), ("b", order)):
        path = directory / f"{name}.jsonl"
        extra = [{"text": f"always {name} {number}"} for number in range(100)]  # so that no split is empty
        path.write_text("".join(json.dumps(record) + "\n" for record in [*dataset_rows, *extra]))
        add(store, Addition(name=name, sources=[open_source(path, None, None, None)], rule=rule))
    splits = {}
    for name in ("a", "b"):
        for split, members in records(store, name).items():
            for record in members:
                assert splits.setdefault(record_bytes(record), split) == split
        contents = [record_bytes(record) for part in records(store, name).values() for record in part]
        assert len(contents) == len(set(contents))
    expected = {
        record_bytes(record)
        for record in rows
        if any(str(value).strip() for value in record.values() if value is not None)
    }
    assert expected <= set(splits)


def test_shares_and_seeds(store, source):
    many = source([(f"film {number}", 1) for number in range(4000)])
    for name, seed in (("a", 0), ("b", 1)):
        add(store, Addition(name=name, sources=[many], rule=SplitRule.parse("70/20/10", seed)))
        counts = store.about(name).records
        assert [round(counts[split] / 400) for split in SPLITS] == pytest.approx([7, 2, 1], abs=0.6)
    assert records(store, "a")["test"] != records(store, "b")["test"]
    add(store, Addition(name="c", sources=[many], rule=SplitRule.parse("100", 0)))
    assert list(content(store.directory("c"))) == ["train.jsonl"]
    for wrong in ("80/10", "0/100", "80/10/5/5", "a", "101/-1", ""):
        with pytest.raises(BadRequest, match="sum to 100"):
            SplitRule.parse(wrong, 0)


def test_duplicates_empty_and_long_records_are_dropped_and_fields_mapped(store, tmp_path):
    lines = [{"body": f"film {number}", "n": 2**63} for number in range(60)]
    lines += [
        {"body": "film 1", "n": 2**63},
        {"n": 2**63, "body": "film 2"},
        {"body": " ", "n": None},
        {"body": "x" * MAX_RECORD_BYTES, "n": 1},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sources = [open_source(path, None, None, None)]
    fields = FieldMap({"text": "body", "number": "n"}, {"label": "1"})
    added = add(store, Addition(name="a", sources=sources, fields=fields))
    assert (added.read, added.added, added.duplicates, added.empty, added.too_long) == (64, 60, 2, 1, 1)
    assert added.preview[0] == {"text": "film 0", "number": 2**63, "label": "1"}
    assert sum(len(part) for part in records(store).values()) == 60
    with pytest.raises(InvalidDataset, match="no column 'text'; the columns are body, n"):
        add(store, Addition(name="b", sources=sources, fields=FieldMap({"text": "text"})))
    with pytest.raises(InvalidDataset, match="there is a column 'n'"):
        add(store, Addition(name="b", sources=sources, fields=FieldMap({}, {"n": "1"})))
    path.write_text('{"text": "\\ud800"}\n')  # half of a character
    with pytest.raises(InvalidDataset, match=r"a\.jsonl:1: the record cannot be stored"):
        add(store, Addition(name="b", sources=sources))
    assert list(store.directories()) == ["a"]


def test_append_keeps_the_rule_and_replace_forgets_it(store, source):
    sources, more = [source()], [source([*ROWS, ("one more", 1), ("two more", 0)], "more.csv")]
    add(store, Addition(name="a", sources=sources, rule=SplitRule((60, 20, 20), 7)))
    before = content(store.directory("a"))
    with pytest.raises(BadRequest, match="--replace, or add to it with --append"):
        add(store, Addition(name="a", sources=sources))
    with pytest.raises(BadRequest, match="is split 60/20/20 with seed 7"):
        add(store, Addition(name="a", sources=sources, rule=SplitRule(), mode="append"))
    with pytest.raises(NotFound):
        add(store, Addition(name="b", sources=sources, mode="append"))
    assert content(store.directory("a")) == before
    dry = add(store, Addition(name="a", sources=more, mode="append", dry_run=True))
    assert content(store.directory("a")) == before
    added = add(store, Addition(name="a", sources=more, mode="append"))
    assert (added.added, added.duplicates) == (dry.added, dry.duplicates) == (2, 100)
    after = content(store.directory("a"))
    assert all(after[name].startswith(lines) for name, lines in before.items())
    add(store, Addition(name="a", sources=sources, mode="replace"))
    assert store.about("a").rule == SplitRule()


@pytest.mark.parametrize(
    ("count", "shares", "words"),
    [
        (1, "100", "split train has 1 records and needs at least 2"),
        (2, "1/98/1", "needs at least 1"),
        (0, "100", "the files contain no records; .* needs rows below the names of its columns"),
    ],
)
def test_a_split_that_training_cannot_use_is_refused(store, source, count, shares, words):
    with pytest.raises(InvalidDataset, match=words):
        add(store, Addition(name="a", sources=[source(ROWS[:count])], rule=SplitRule.parse(shares, 0)))
    assert not store.directories()


def test_a_task_that_most_records_do_not_fit_is_refused_without_their_text(store, source):
    bad = [(f"secret {number}", "spam") for number in range(150)]
    reason = "field 'label' is blank or has a text that the task does not know"
    with pytest.raises(InvalidDataset, match=f"100 of 250 records fit task 'sst2'.*150: {reason}") as error:
        add(store, Addition(name="a", sources=[source([*ROWS, *bad])], task=TASK))
    assert "secret" not in error.value.detail
    added = add(store, Addition(name="a", sources=[source([*ROWS, *bad[:10]])], task=TASK))
    facts = added.check.facts()
    assert (facts["records"], facts["fitting"], facts["labels"]) == (110, 100, {"negative/0": 50, "positive/1": 50})
    assert [(row["records"], row["first"].rpartition(":")[2]) for row in facts["unusable"]] == [(10, "102")]
    # "the film 10 is warm It was terrible": 36 characters, so 32 tokens hold all.
    assert (facts["sequence_length"], facts["share_uncut"]) == (32, 1.0)
    assert "secret" not in json.dumps(facts) + "".join(added.check.lines())


def test_lengths_are_those_of_the_tokenizer(store, source):
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # a token a character
    rows = [("ü" * length, number % 2) for number, length in enumerate([20] * 40 + [100] * 60)]
    rows = [(f"{text}{number:03}", label) for number, (text, label) in enumerate(rows)]
    addition = Addition("a", [source(rows)], task=TASK, tokenizer=tokenizer, dry_run=True)
    check = add(store, addition).check
    # " It was terrible" has 16 tokens, of which the last one is not read.
    assert (check.cut(23 + 15), check.cut(23 + 14), check.cut(103 + 15), check.cut(103 + 14)) == (60, 100, 0, 60)
    assert (check.suggested, check.facts()["cut"], check.facts()["by_tokenizer"]) == (128, 0, True)
    counted, language = check.length_lines(64)
    assert "sequence_length 64 holds 40% of the records uncut; 60 are cut (by the base's" in counted
    assert 1 < check.bytes_per_token < 2  # "ü" has two bytes
    assert "another base is likely to learn more" in language
    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    assert len(add(store, replace(addition, tokenizer=words)).check.length_lines(64)) == 1
    estimated = add(store, replace(addition, tokenizer=None)).check
    assert estimated.suggested == 32
    assert "an estimate of 4 characters a token" in estimated.length_lines(32)[0]


def test_nulls_are_missing_and_a_column_may_be_missing_from_the_first_records(store, tmp_path):
    path = tmp_path / "a.jsonl"
    first = [{"text": "no label yet"}, {"text": None, "label": 1}, {"text": " ", "label": 1}, {"text": {"a": "b"}}]
    rows = [*first, {"text": "x", "label": None}, *({"text": f"film {n}", "label": float(n % 2)} for n in range(60))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for fields in (FieldMap(), FieldMap({"text": "text", "label": "label"})):
        check = add(store, Addition("a", [open_source(path)], fields, task=TASK, dry_run=True)).check
        assert (check.fitting, check.labels) == (60, {"negative/0": 30, "positive/1": 30})
        assert check.reasons == {
            f"field 'label' is missing or null, which task {TASK.name!r} needs": 2,
            f"field 'text' is missing or null, which task {TASK.name!r} needs": 1,
            "field 'text' is an object; it must be a text": 1,
            "the text is blank": 1,
        }
    with pytest.raises(InvalidDataset, match=r"a\.jsonl: there is no column 'stars'; the columns are text"):
        add(store, Addition("a", [open_source(path)], FieldMap({"text": "text", "label": "stars"})))


def test_lists_of_answers_are_counted_by_what_is_wrong_with_them_and_mapped(store, tmp_path):
    path, squad = tmp_path / "squad.jsonl", {"title": "t", "context": "c", "question": "Who?"}
    answer_lists = (
        [{"text": ["Ann", "Ann B."], "answer_start": [0, 0]}] * 40 + [{"text": []}] * 2 + [{"text": ["Ann", 7]}]
    )
    rows = [squad | {"id": number, "answers": answers} for number, answers in enumerate(answer_lists)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [open_source(path, None, None, None)]
    added = add(store, Addition(name="a", sources=sources, task=named_task("squad")))
    assert added.check.fitting == 40
    assert {reason.partition("list")[2]: count for reason, count in added.check.reasons.items()} == {
        "; it needs at least one text": 2,
        " with something other than texts, or with a blank one": 1,
    }
    task = Task(name="short", kind="completion", prompt="{question}", answer="{reply}", metric="exact_match")
    fields = FieldMap.parse(["question=question", "reply=answers.text", "answers.text=id"])
    added = add(store, Addition(name="b", sources=sources, fields=fields, task=task))
    assert added.check.fitting == 40
    assert added.preview[0] == {"question": "Who?", "reply": ["Ann", "Ann B."], "answers.text": 0}


def test_files_are_the_owners_alone(store, source):
    before = os.umask(0)
    try:
        add(store, Addition(name="a", sources=[source()]))
    finally:
        os.umask(before)
    paths = [store.path, *(path for path in store.path.rglob("*") if not path.is_symlink())]
    modes = {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_file()}
    assert (modes, {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_dir()}) == ({0o600}, {0o700})


def test_a_full_disk_and_another_process_leave_everything_as_it_was(store, source, monkeypatch):
    add(store, Addition(name="a", sources=[source()]))
    before = content(store.directory("a"))
    with store.changing(), pytest.raises(Conflict, match="another"):
        add(store, Addition(name="b", sources=[source()]))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    for owner, name in ((os, "fsync"), (SeenDigests, "add")):
        with monkeypatch.context() as broken:
            broken.setattr(owner, name, full)
            with pytest.raises(MobizoError, match=r"data set a is unchanged .*No space left"):
                add(store, Addition(name="a", sources=[source(ROWS[:50])], mode="replace"))
        assert content(store.directory("a")) == before
    assert len(list((store.path / ".versions").iterdir())) == 1


def killed_at(call, number):
    """Runs `call` in a child that dies by SIGKILL at its n-th access to the file system; returns whether it died."""
    child = os.fork()
    if child == 0:
        remaining = [number]

        def count(event, _):
            if event.startswith(("open", "os.", "shutil.", "sqlite3.")):
                remaining[0] -= 1
                if remaining[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(count)
            call()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def kills(call):
    """Has `call(n)` killed at its n-th access to the file system; yields each n, the last one of a call that lived."""
    for number in itertools.count(1):
        died = killed_at(partial(call, number), number)
        yield number
        if not died:
            assert number > 20
            return


def test_a_kill_at_any_access_to_the_disk_leaves_the_old_or_the_new_data_set(store, source):
    old, new = Addition(name="a", sources=[source()]), [source([*ROWS, ("more", 1)], "b.csv")]
    change = Addition(name="a", sources=new, mode="append")
    add(store, old)
    before = content(store.directory("a"))
    outcomes = set()
    for _ in kills(lambda _: add(store, change)):
        current = content(DatasetStore(store.path).directory("a"))
        about = store.about("a").records
        assert {f"{split}.jsonl": count for split, count in about.items()} == {
            name: lines.count(b"\n") for name, lines in current.items()
        }
        outcomes.add(current == before)
        if current != before:
            add(store, Addition(name="a", sources=old.sources, mode="replace"))
            assert content(store.directory("a")) == before
    assert outcomes == {True, False}
    with store.changing():
        assert len(list((store.path / ".versions").iterdir())) == 1


LABELLED = Task(name="thumbs", kind="preference", prompt="{text}", answer="{completion}")


def labelled(tmp_path, labels):
    rows = [{"text": f"t{number}", "completion": f" c{number}", "label": label} for number, label in enumerate(labels)]
    path = tmp_path / "thumbs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [open_source(path)]


def test_preferences_are_counted_by_label_and_by_what_is_wrong_with_them(store, tmp_path):
    sources = labelled(tmp_path, [True, False] * 30 + ["perhaps"])
    check = add(store, Addition("a", sources, task=LABELLED, dry_run=True)).check
    assert (check.fitting, check.labels) == (60, {"true": 30, "false": 30})
    assert check.reasons == {"field 'label' must be true or false": 1}
    assert "labels: true: 30, false: 30" in check.lines()
    assert check.facts()["answer_length"] == 8


def test_preferences_whose_labels_are_all_alike_are_refused(store, tmp_path):
    with pytest.raises(InvalidDataset, match=r"every label of task 'thumbs' is true; .* nothing was added"):
        add(store, Addition("a", labelled(tmp_path, [True] * 40), task=LABELLED))
    assert not store.directories()


def test_single_records_make_a_data_set_and_a_kill_leaves_it_with_or_without_the_last_one(store):
    assert append_record(store, "a", {"text": "first"})
    assert not append_record(store, "a", {"text": "first"})
    with pytest.raises(TooLarge):
        append_record(store, "a", {"text": "x" * MAX_RECORD_BYTES})
    outcomes = set()
    for number in kills(lambda number: append_record(store, "a", {"text": f"record {number}"})):
        texts = [record["text"] for split in records(store).values() for record in split]
        assert "first" in texts
        outcomes.add(f"record {number}" in texts)
    assert outcomes == {True, False}
