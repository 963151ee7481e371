"""The command that a run's directory keeps: to be typed again, and without what is secret."""

import pytest

from manyhands.data.store.rundir import shown_command


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (
            ["/usr/bin/manyhands", "train", "digits", "--strategy", "ps servers=2"],
            "manyhands train digits --strategy 'ps servers=2'",
        ),
        (["/lib/manyhands/__main__.py", "train", "line"], "manyhands train line"),
        (
            ["manyhands", "federated", "join", "--token", "s3cret", "--api-key=s3cret", "--steps", "3"],
            "manyhands federated join --token '***' '--api-key=***' --steps 3",
        ),
        (
            ["manyhands", "train", "line", "--cluster", "ray://me:s3cret@host:1/?token=s3cret&x=1"],
            "manyhands train line --cluster 'ray://***@host:1/?token=***&x=1'",
        ),
        (
            ["manyhands", "launch", "--workers", "2", "mine.py", "--db", "s3cret"],
            "manyhands launch --workers 2 mine.py ...",
        ),
        (["/home/me/mine.py", "--whatever", "s3cret"], "python mine.py"),
        ([""], ""),
        ([], ""),
    ],
)
def test_a_command_is_kept_without_its_secrets(words: list[str], kept: str) -> None:
    assert shown_command(words) == kept
    assert "s3cret" not in kept
