"""What `manyhands show` shows of a run that is over: its server, asked over loopback as a browser would."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx

from manyhands.cli.look_commands import serving
from manyhands.observe.analyse.follow import existing_run


def watched(run: Path) -> str:
    """The page of a run."""
    with serving(existing_run(run).poll, "127.0.0.1", 0, "bye") as url:
        address = urlsplit(url)
        (token,) = parse_qs(address.fragment)["token"]
        headers = {"authorization": f"Bearer {token}"}
        return httpx.get(f"http://{address.netloc}/report", headers=headers).text
