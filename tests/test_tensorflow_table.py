"""docs/tensorflow.md says of each of TensorFlow's names what is here, and is right."""

import re

import pytest
import tensorflow_table as table

THEIRS = table.theirs()


@pytest.fixture(scope="module")
def page():
    return table.read_page()


def test_every_class_has_a_section(page):
    assert set(page) == set(THEIRS)


@pytest.mark.parametrize(
    "name", sorted(n for n in THEIRS if isinstance(THEIRS[n], dict))
)
def test_the_table_is_right(page, name):
    """Names, parameters, defaults; and of what differs both signatures."""
    section = page[name]
    named = {}
    for there, here in section.rows:
        for cell in re.findall(r"`([^`]+)`", there):
            member = cell.partition("(")[0]
            assert member not in named, f"{member} stands in two rows"
            named[member] = cell, here
    wrong = []
    for member, signature in THEIRS[name].items():
        found = table.ours(section.here, member)
        is_in_row, is_named_same = member in named, member in section.same
        if table.is_same(signature, found):
            if not is_named_same or is_in_row:
                wrong.append(f"{member} is the same")
        elif found is None:
            if is_named_same or not is_in_row or not _is_absent(named[member]):
                wrong.append(f"{member} is absent")
        else:
            both = f"{member}{signature}", f"{member}{found}"
            if is_named_same or not is_in_row or not _shows(named[member], *both):
                wrong.append(f"{both[0]} is here {both[1]}")
    assert not wrong, "\n".join(wrong)
    assert set(named) | set(section.same) == set(THEIRS[name])


def _is_absent(row):
    """Return whether a row says that something is absent, and why."""
    return re.match(r"absent: .{3}", row[1])


def _shows(row, theirs, ours):
    """Return whether a row shows both signatures; properties have none."""
    theirs, ours = (text.removesuffix("value") for text in (theirs, ours))
    return row[0] == theirs and row[1].startswith(f"`{ours}`: ")


def test_functions_and_other_names_are_there():
    text = table.PAGE.read_text()
    for name in table.without_counterpart():
        assert f"`{name}`" in text, name
    for name, signature in THEIRS.items():
        if isinstance(signature, str):
            member = name.rpartition(".")[2]
            section = table.read_page()[name]
            found = table.text_of(getattr(table.mpidist, section.here))
            assert (
                section.rows == []
                if found == signature
                else _shows(
                    (section.rows[0][0].strip("`"), section.rows[0][1]),
                    f"{member}{signature}",
                    f"{section.here}{found}",
                )
            )
