from memopt.memory.breakdown import MemoryBreakdown, TensorAtPeak, align, scale_of


def breakdown(**changes):
    sizes = {
        "parameters": 4 * 10**9,
        "buffers": 0,
        "gradients": 4 * 10**9,
        "optimizer_state": 8 * 10**9,
        "inputs": 1_000_000,
        "activations": 3 * 10**9,
        "workspace": 500_000_000,
    }
    sizes.update(changes)
    return MemoryBreakdown(**sizes, total=sum(sizes.values()), largest=(TensorAtPeak("softmax", 10**9, (8, 4), "f"),))


def test_table_is_aligned_and_shows_both_units():
    lines = str(breakdown()).splitlines()
    assert lines[0].split() == ["GB", "GiB"]
    table = lines[: lines.index("")]
    assert len({len(line) for line in table}) == 1
    assert lines[1].split() == ["parameters", "4.000", "3.725"]
    assert lines[table.index(table[-1])].split() == ["total", "19.501", "18.162"]


def test_largest_tensors_follow_the_table():
    text = str(breakdown())
    assert "largest tensors at the peak:\nsoftmax  1.000 GB  f[8, 4]" in text


def test_small_totals_are_whole_bytes():
    few = MemoryBreakdown(1, 2, 3, 4, 5, 6, 7, 28)
    assert str(few).splitlines()[-1].split() == ["total", "28", "28"]


def test_scale_follows_the_size():
    assert [scale_of(size)[0] for size in (0, 999, 1000, 10**6, 10**9, 10**13)] == ["B", "B", "kB", "MB", "GB", "GB"]


def test_align_of_nothing_is_nothing():
    assert align([]) == []
