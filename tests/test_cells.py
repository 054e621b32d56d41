"""Records survive kills, are whole or absent, and are refused when damaged."""

import json
import re

import pyarrow.parquet as pq
import pytest

from tfm import cells, manifest, side_file
from tfm.cell_shape import RECORD
from tfm.cells import KINDS, CellWriter, load_cells
from tfm.trace import RequestTrace, StepTrace, TreeNode

DECODE = {"method": "tfm", "temperature": 1, "rule": "target_only", "budget": 64, "depth": None, "width": 4}
DECODE |= {"children": 8, "candidates": 64, "max_new_tokens": 48, "requests": 1, "gdn_backend": "solve"}
CELL = {"suite": "toy", "engine": "torch", "target": "toy", "dataset": "set", "domain": "math", "variant": "tfm-b64-w4"}
CELL |= {"setting": "t1", "seed": 0, "clock": "stages", "traced": True, "device": "cpu", "dtype": "float32"}
CELL |= {"reasoning": False, "template": "paper", "decode": DECODE}
FACTS = {"cell": CELL, "source_digest": "s", "prompts_sha256": "p", "device": {"name": "toy", "torch_threads": 1}}
FACTS |= {"environment": {"git": {"commit": "abc", "dirty": False}}}


def trace(name: str, index: int = 0) -> RequestTrace:
    times = {
        "draft": 1.5,
        "build": 0.5,
        "verify": 2.0,
        "accept": 0.25,
        "commit": 0.125,
        "other": 0.1,
        "target_gdn": 1.0,
    }
    step = StepTrace(0, 9, 65, 15, 2, 3, 3, 1.75, times)
    node = TreeNode(0, 1, 0, 7, -0.5, 1, True)
    return RequestTrace(name, index, 9, [1, 2, 3], "stop", 10.0, 4.475, [step], [node])


def finished(folder, names=("a", "b")):
    with CellWriter(folder, digest="d") as writer:
        for index, name in enumerate(names):
            writer.add(trace(name, index))
        return writer.finish(list(names), FACTS)


def test_a_finished_cell_reads_back_with_the_cell_in_every_row(tmp_path):
    finished(tmp_path)
    records = load_cells([tmp_path])
    assert records.requests["id"].tolist() == ["a", "b"] and records.requests["new_tokens"].tolist() == [3, 3]
    assert records.requests["wall_us"].tolist() == [14.475, 14.475]
    for column, value in {"method": "tfm", "setting": "t1", "commit": "abc", "device_name": "toy"}.items():
        assert set(records.requests[column]) == {value}
    assert records.steps["accepted_untrimmed"].tolist() == [3, 3] and records.steps["target_gdn_us"].tolist() == [1, 1]
    assert records.steps["id"].tolist() == ["a", "b"] and records.trees["token"].tolist() == [7, 7]


def test_every_row_says_what_was_sampled_from_and_what_verified(tmp_path):
    """EAGLE#301, ATOM#2318 (C060, C061): also rows of cells from before siblings and filters were written down."""
    finished(tmp_path)
    row = load_cells([tmp_path]).requests.iloc[0]
    assert (row["temperature"], row["top_p"], row["top_k"], row["min_p"], row["repetition_penalty"]) == (1, 1, -1, 0, 1)
    assert (row["rule"], row["gdn_backend"], row["siblings"]) == ("target_only", "solve", "top")


def test_a_step_without_a_bound_is_empty_and_not_zero(tmp_path):
    unbounded = trace("a")
    unbounded.steps[0].expected_accepted = None
    with CellWriter(tmp_path, digest="d") as writer:
        writer.add(unbounded)
    with CellWriter(tmp_path, digest="d") as writer:  # as after a kill
        writer.finish(["a"], FACTS)
    assert load_cells([tmp_path]).steps["expected_accepted"].isna().all()
    assert pq.read_table(tmp_path / "steps.parquet")["expected_accepted"].null_count == 1


def test_finals_replace_the_side_file(tmp_path):
    with CellWriter(tmp_path, digest="d") as writer:
        writer.add(trace("a"))
        assert (tmp_path / "done.jsonl").exists()
        writer.finish(["a"], FACTS)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["cell.json", "requests.parquet", "steps.parquet", "trees.parquet"]


def test_trees_are_written_even_when_none_was_traced(tmp_path):
    bare = trace("a")
    bare.trees.clear()
    with CellWriter(tmp_path, digest="d") as writer:
        writer.add(bare)
        writer.finish(["a"], FACTS)
    table = pq.read_table(tmp_path / "trees.parquet")
    assert table.num_rows == 0 and "log_prob" in table.column_names


def test_a_killed_cell_goes_on_where_it_stopped(tmp_path):
    with CellWriter(tmp_path, digest="d") as writer:
        writer.add(trace("a"))
    with CellWriter(tmp_path, digest="d") as writer:
        assert list(writer.done) == ["a"] and writer.done["a"] == trace("a")
        writer.add(trace("b", 1))
        assert writer.finish(["a", "b"], FACTS)["files"]["requests.parquet"]["rows"] == 2


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_torn_last_line_is_dropped(tmp_path, cut):
    with CellWriter(tmp_path, digest="d") as writer:
        writer.add(trace("a"))
        writer.add(trace("b", 1))
    side = tmp_path / "done.jsonl"
    side.write_bytes(side.read_bytes()[:-cut])
    with CellWriter(tmp_path, digest="d") as writer:
        assert list(writer.done) == ["a"]
        writer.add(trace("b", 1))
    with CellWriter(tmp_path, digest="d") as writer:
        assert list(writer.done) == ["a", "b"]


@pytest.mark.parametrize("bit", range(8))
def test_a_line_with_a_flipped_bit_is_done_again_and_no_other(tmp_path, bit):
    with CellWriter(tmp_path, digest="d") as writer:
        for index, name in enumerate("abc"):
            writer.add(trace(name, index))
    side = tmp_path / "done.jsonl"
    lines = side.read_bytes().split(b"\n")
    middle = len(lines[2]) * (bit + 1) // 9  # eight places: the checksum, keys, values
    damaged = lines[2][:middle] + bytes([lines[2][middle] ^ 1 << bit]) + lines[2][middle + 1 :]
    side.write_bytes(b"\n".join([*lines[:2], damaged, *lines[3:]]))
    with CellWriter(tmp_path, digest="d") as writer:
        # a bit can turn a character into a line end, which makes two bad lines of one
        assert list(writer.done) == ["a", "c"] and writer.side.damaged in (1, 2)
        writer.add(trace("b", 1))
    with CellWriter(tmp_path, digest="d") as writer:
        assert sorted(writer.done) == ["a", "b", "c"] and writer.done["b"] == trace("b", 1)
        writer.finish(list("abc"), FACTS)
    assert load_cells([tmp_path]).requests["id"].tolist() == ["a", "b", "c"]


@pytest.mark.parametrize("content", [b"", b"\n", b"not json\n", b'{"sha256":"0","record":{}}\n', b'{"sha2'])
def test_a_side_file_that_is_not_ours_starts_over(tmp_path, content):
    (tmp_path / "done.jsonl").write_bytes(content)
    with CellWriter(tmp_path, digest="d") as writer:
        assert not writer.done
        writer.add(trace("a"))
    with CellWriter(tmp_path, digest="d") as writer:
        assert list(writer.done) == ["a"]


def test_a_cell_is_of_one_device(tmp_path):
    """Killed on one card and resumed on another model, it starts over; on the same model it goes on."""
    for name, left in (("a card", []), ("a card", ["a"]), ("another card", [])):
        with CellWriter(tmp_path, digest="d") as writer:
            writer.on_device(name, ["a", "b"])
            assert list(writer.done) == left and writer.side.dropped == (name == "another card")
            if not left:
                writer.add(trace("a"))
    with CellWriter(tmp_path, digest="d") as writer:
        writer.on_device("a third card", ["a"])  # nothing is left to decode, so nothing is mixed
        writer.finish(["a"], {**FACTS, "device": {"name": "another card", "torch_threads": 1}})
    assert cells.reopen(tmp_path)
    with CellWriter(tmp_path, digest="d") as writer:
        writer.on_device("another card", ["a", "b"])
        assert list(writer.done) == ["a"]
        writer.on_device("a third card", ["a", "b"])
        assert not writer.done and writer.facts is None


def test_a_side_file_from_before_devices_were_noted_is_kept(tmp_path):
    with CellWriter(tmp_path, digest="d") as writer:
        writer.add(trace("a"))
    with CellWriter(tmp_path, digest="d") as writer:
        writer.on_device("a card", ["a", "b"])
        assert list(writer.done) == ["a"]


def test_another_digest_starts_over(tmp_path):
    with CellWriter(tmp_path, digest="d") as writer:
        writer.add(trace("a"))
    with CellWriter(tmp_path, digest="e") as writer:
        assert not writer.done


def test_a_second_process_on_the_same_cell_stops(tmp_path):
    with CellWriter(tmp_path, digest="d") as writer:
        writer.add(trace("a"))
        with pytest.raises(BlockingIOError, match="another process is running this cell"):
            CellWriter(tmp_path, digest="d")
        assert list(writer.done) == ["a"]


def test_a_cell_without_all_prompts_is_not_finished(tmp_path):
    with CellWriter(tmp_path, digest="d") as writer:
        writer.add(trace("a"))
        with pytest.raises(ValueError, match="1 of 2 prompts have no record, first 'b'"):
            writer.finish(["a", "b"], FACTS)
    assert not (tmp_path / "cell.json").exists()


def test_a_record_of_another_version_is_refused_by_what_it_lacks(tmp_path):
    finished(tmp_path)
    facts = cells.read_cell(tmp_path)
    del facts["cell"]["template"]
    manifest.write_json(tmp_path / "cell.json", manifest.sealed(facts))
    with pytest.raises(ValueError, match="cell.json: cell.template: missing key; make it again: "):
        load_cells([tmp_path])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", ["half", "empty", "byte", "gone"])
def test_damaged_records_are_refused_with_file_and_rerun_command(tmp_path, kind, damage):  # C117
    finished(tmp_path)
    path = tmp_path / f"{kind}.parquet"
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        middle = len(data) // 2
        changed = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        path.write_bytes({"half": data[:middle], "empty": b"", "byte": changed}[damage])
    with pytest.raises(ValueError) as error:
        load_cells([tmp_path])
    assert str(path) in str(error.value)
    assert f"snakemake --cores all --force {tmp_path.as_posix()}/requests.parquet" in str(error.value)


@pytest.mark.parametrize("field", ["budget", "source_digest", "rows", "device", "manifest_sha256"])
def test_a_changed_value_in_cell_json_is_refused(tmp_path, field):
    finished(tmp_path)
    path = tmp_path / "cell.json"
    text = path.read_text()
    changed = re.sub(rf'("{field}": )("?)', r"\g<1>\g<2>1", text, count=1)
    changed = changed if field != "device" else text.replace('"toy"', '"toi"', 1)
    assert changed != text and json.loads(changed)
    path.write_text(changed)
    with pytest.raises(ValueError, match="cell.json was altered.*make it again: snakemake"):
        load_cells([tmp_path])


@pytest.mark.parametrize("content", ["", "{", '{"cell": {}}', "[]", "null", '"cell"'])
def test_a_damaged_cell_json_is_refused(tmp_path, content):
    finished(tmp_path)
    (tmp_path / "cell.json").write_text(content)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "cell.json")) + ".*make it again: snakemake"):
        load_cells([tmp_path])


def test_cell_json_is_written_last_and_an_old_one_is_gone_before_its_records_change(tmp_path, monkeypatch):
    """A kill between any two writes leaves no cell.json: what it certifies is there, whole, or it is not there."""
    finished(tmp_path)
    events = []
    real_atomic, real_json = cells.write_atomic, cells.write_json
    seen = lambda: (tmp_path / "cell.json").exists()  # noqa: E731
    monkeypatch.setattr(
        cells, "write_atomic", lambda path, data: (events.append((path.name, seen())), real_atomic(path, data))
    )
    monkeypatch.setattr(
        cells, "write_json", lambda path, value: (events.append((path.name, seen())), real_json(path, value))
    )
    finished(tmp_path)
    names = ["requests.parquet", "steps.parquet", "trees.parquet", "cell.json"]
    assert events == [(name, False) for name in names]


def test_no_write_of_a_final_leaves_half_a_file(tmp_path, monkeypatch):
    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifest.os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        manifest.write_atomic(tmp_path / "cell.json", b"{}")
    assert not list(tmp_path.iterdir())


def test_a_whole_cell_is_taken_back_and_written_again_byte_for_byte(tmp_path):
    """Snakemake killed between a cell's last write and its own note of it: the job runs again, but decodes nothing."""
    bare = trace("b", 1)
    bare.trees.clear()
    bare.steps[0].stage_us = bare.prefill_us = bare.decode_us = None
    with CellWriter(tmp_path, digest="d") as writer:
        writer.add(trace("a"))
        writer.add(bare)
        writer.finish(["a", "b"], FACTS)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert cells.reopen(tmp_path) and cells.reopen(tmp_path)
    for name in before:
        (tmp_path / name).unlink()  # as Snakemake does
    with CellWriter(tmp_path, digest="d") as writer:
        # step times are stored as float32
        assert list(writer.done) == ["a", "b"] and writer.done["b"] == bare
        writer.finish(["a", "b"], writer.facts)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_cell_that_is_not_whole_is_not_taken_back(tmp_path):
    finished(tmp_path)
    (tmp_path / "steps.parquet").write_bytes(b"")
    assert not cells.reopen(tmp_path) and not (tmp_path / "done.jsonl").exists()
    assert not cells.is_whole(tmp_path)


def test_a_cell_is_done_only_with_the_digest_of_now(tmp_path):
    finished(tmp_path)
    assert cells.is_whole(tmp_path) and cells.is_whole(tmp_path, digest="d")
    assert not cells.is_whole(tmp_path, digest="e") and not cells.is_whole(tmp_path / "none")


def test_a_file_that_its_holder_removed_before_our_lock_is_not_written(tmp_path, monkeypatch):
    """Another process opens the side file, we finish and remove it, then its lock succeeds on a file without a name."""
    first = CellWriter(tmp_path, digest="d")
    real = side_file.fcntl.flock

    def finish_then_lock(descriptor, kind):
        monkeypatch.setattr(side_file.fcntl, "flock", real)
        first.add(trace("a"))
        first.finish(["a"], FACTS)
        first.__exit__()
        real(descriptor, kind)

    monkeypatch.setattr(side_file.fcntl, "flock", finish_then_lock)
    with CellWriter(tmp_path, digest="d") as second:
        second.add(trace("b"))
        assert side_file.count_records(tmp_path / "done.jsonl") == 1


def test_missing_cells_are_listed_with_how_far_they_are(tmp_path):
    with CellWriter(tmp_path / "half", digest="d") as writer:
        writer.add(trace("a"))
    records = load_cells([tmp_path / "half", tmp_path / "none"], allow_missing=True)
    assert list(records.missing.values()) == ["incomplete, 1 requests done", "not run"]
    with pytest.raises(ValueError, match="cell.json is missing"):
        load_cells([tmp_path / "none"])


def keys_of(shape, *above):
    for name, one in shape.items():
        yield (*above, name)
        yield from keys_of(one, *above, name) if isinstance(one, dict) else ()


@pytest.mark.parametrize("where", [path for path in keys_of(RECORD) if path[-1] != manifest.SEAL], ids=".".join)
def test_a_sealed_cell_json_that_lacks_a_key_or_has_another_type_is_refused(tmp_path, where):
    """A file of another version or hand: the seal fits, and what a table reads is not there."""
    finished(tmp_path)
    (tmp_path / "bad").mkdir()
    *above, last = where
    for change in ("drop", "type"):
        facts = json.loads((tmp_path / "cell.json").read_text())
        place = facts
        for key in above:
            place = place[key]
        if change == "drop" and not last.endswith("?"):
            del place[last]
        else:
            place[last.removesuffix("?")] = [[3.5]]
        manifest.write_json(tmp_path / "bad/cell.json", manifest.sealed(facts))
        with pytest.raises(ValueError) as caught:
            load_cells([tmp_path / "bad"])
        key, said = ".".join(where).removesuffix("?"), str(caught.value)
        assert f"cell.json: {key}: " in said and "make it again: snakemake" in said, said
        assert ("missing key" if "missing" in said else "[[3.5]] is not allowed (allowed: ") in said
        assert cells.is_whole(tmp_path) and not cells.is_whole(tmp_path / "bad")


@pytest.mark.parametrize("name", ["cell.json", "steps.parquet"])
def test_a_folder_in_a_records_place_is_refused_with_the_rerun_command(name, tmp_path):
    with CellWriter(tmp_path, digest="d") as writer:
        writer.finish([], FACTS)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"{name} .*make it again: snakemake"):
        load_cells([tmp_path])
    assert not cells.is_whole(tmp_path)
