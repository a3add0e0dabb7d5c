"""minimalloc's format, read and written; each way of being malformed is named by line and column."""

import csv
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.solve.pack import Buffer
from memopt.solve.pack_csv import CsvError, read_table
from tests.solve.packings import buffer_lists

EXAMPLE = "id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\n"


def test_the_same_lines_with_a_column_more():
    table = read_table(EXAMPLE)
    assert table.ids == ("b1", "b2")
    assert table.buffers == (Buffer(0, 3, 4), Buffer(3, 9, 4))
    assert table.with_offsets([8, 0]) == "id,lower,upper,size,offset\nb1,0,3,4,8\nb2,3,9,4,0\n"


def test_columns_in_any_order_alignment_and_columns_of_others():
    table = read_table('note,alignment,size,upper,id,lower\n"a, b",8,4,3,x,-1\n')
    assert table.buffers == (Buffer(-1, 3, 4, 8),)
    assert table.with_offsets([16]) == 'note,alignment,size,upper,id,lower,offset\n"a, b",8,4,3,x,-1,16\n'


@pytest.mark.parametrize("header", ["buffer,start,end,size", "buffer_id,begin,end,size"])
def test_other_names_and_the_last_moment(header):
    assert read_table(f"{header}\nx,2,5,7\n").buffers == (Buffer(2, 6, 7),)


def test_windows_line_ends_a_byte_order_mark_and_blank_lines():
    assert read_table("\ufeffid,lower,upper,size\r\n\r\nb1, 0,3 ,4\r\n").buffers == (Buffer(0, 3, 4),)


def test_a_header_alone_is_a_list_of_nothing():
    assert read_table("id,lower,upper,size\n").with_offsets([]) == "id,lower,upper,size,offset\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: no header; it must name the columns id, lower, upper and size"),
        ("id,lower,upper\n", "line 1: no column size; the header must name id, lower, upper and size"),
        ("\nid,lower,upper,size,start\n", "line 2, column lower: named twice"),
        ("id,lower,upper,size,gaps\n", "line 1, column gaps: lives with gaps are not supported"),
        ("id,lower,upper,size,offset\n", "line 1, column offset: offsets given beforehand are not supported: .*"),
        (EXAMPLE + "b3,1,2\n", "line 4: 3 fields, where the header names 4"),
        (EXAMPLE + "b3,1,2,3,4\n", "line 4: 5 fields, where the header names 4"),
        (EXAMPLE + "b3,1,x,4\n", "line 4, column upper: 'x' is not a whole number of up to 18 digits"),
        (EXAMPLE + "b3,1.0,2,4\n", "line 4, column lower: '1.0' is not a whole number .*"),
        (EXAMPLE + "b3,,2,4\n", "line 4, column lower: '' is not a whole number .*"),
        (EXAMPLE + "b3,1,2,1_000\n", "line 4, column size: '1_000' is not .*"),
        (EXAMPLE + "b3,1,2,1234567890123456789\n", "line 4, column size: '1234567890123456789' is not .*"),
        (EXAMPLE + "b3,3,2,4\n", "line 4, column upper: upper 2 is before lower 3"),
        ("id,start,end,size\nx,3,1,4\n", "line 2, column end: upper 2 is before lower 3"),
        (EXAMPLE + "b3,1,2,-4\n", "line 4, column size: size -4 is negative"),
        ("id,lower,upper,size,alignment\nx,1,2,3,0\n", "line 2, column alignment: alignment 0 is below 1"),
        (EXAMPLE + '"b3,1,2,3\n', "line 4: unexpected end of data"),
    ],
)
def test_malformed_text_is_named_by_line_and_column(text, message):
    with pytest.raises(CsvError, match=f"^{message}$"):
        read_table(text)


@settings(max_examples=100)
@given(buffers=buffer_lists(alignments=(1, 4)), names=st.lists(st.text("ab,\" '", max_size=4), min_size=6, max_size=6))
def test_what_is_written_is_read_again(buffers, names):
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["id", "lower", "upper", "size", "alignment"])
    writer.writerows([name, *buffer] for name, buffer in zip(names, buffers, strict=False))
    table = read_table(text.getvalue())
    assert list(table.buffers) == buffers
    written = list(csv.DictReader(io.StringIO(table.with_offsets(range(len(buffers))))))
    assert [int(row["offset"]) for row in written] == list(range(len(buffers)))
    assert [row["id"] for row in written] == names[: len(buffers)]
