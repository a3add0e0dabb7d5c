"""The one line that is kept of an error."""

from memopt.errors import first_line


def test_blank_lines_in_front_are_passed_over_and_the_rest_is_left_out():
    assert first_line(RuntimeError("\n  \n  no such op  \nadvice")) == "no such op"


def test_an_error_without_words_is_its_type():
    assert first_line(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert first_line(ValueError(" \n ")) == "ValueError"
