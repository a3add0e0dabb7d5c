"""Who may use the device while a row is timed."""

from memopt.comparison.pool import Pool


def test_no_row_is_timed_while_another_process_has_much_to_do(tmp_path):
    pools = [Pool(tmp_path, 10, True, 2, None) for _ in range(2)]
    with pools[0]._turn() as first, pools[1]._turn() as second:
        assert first and not second
    with pools[1]._turn() as again:
        assert again


def test_nothing_to_do_ends_at_once(tmp_path):
    assert list(Pool(tmp_path, 10, True, 1, 0.0).run()) == []
