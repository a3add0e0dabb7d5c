"""The one line that is kept of an error."""

from memopt.errors import cause_line, first_line


def test_blank_lines_in_front_are_passed_over_and_the_rest_is_left_out():
    assert first_line(RuntimeError("\n  \n  no such op  \nadvice")) == "no such op"


def test_an_error_without_words_is_its_type():
    assert first_line(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert first_line(ValueError(" \n ")) == "ValueError"


def test_the_cause_is_what_an_error_came_of_in_the_end():
    try:
        try:
            raise KeyError("inner") from ValueError("no such op\nadvice")
        except KeyError as error:
            raise RuntimeError("outer") from error
    except RuntimeError as error:
        assert cause_line(error) == "no such op"
