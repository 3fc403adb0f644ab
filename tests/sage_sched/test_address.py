from __future__ import annotations

import pytest

from sage_sched.app.address import Address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("/run/sage", Address(path="/run/sage")),
        ("~/sage", Address(path="~/sage")),
        ("./sage:1", Address(path="./sage:1")),
        ("localhost:80", Address(host="localhost", port=80)),
        ("127.0.0.1:65535", Address(host="127.0.0.1", port=65535)),
        ("[::1]:80", Address(host="::1", port=80)),
    ],
)
def test_an_address_is_read_and_written_alike(text: str, address: Address) -> None:
    assert Address.parse(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text", ["", "sage", ":80", "host:", "host:0", "host:65536", "a b:80", "::1:80", "/\0"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="allowed"):
        Address.parse(text)
