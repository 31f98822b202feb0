"""Tar headers, written here: tarfile's bytes differ between Python versions, and equal input must give equal digests.

The files are plain POSIX tar (ustar, with a pax record only for names that need one), which tar, tarfile and
WebDataset read.
"""

from __future__ import annotations

from p2p_dmc.data.index import BLOCK_BYTES

TRAILER = bytes(2 * BLOCK_BYTES)
"""What a tar ends with."""
_LARGEST_OCTAL = 8**11
_OWNER = b"0000644\0" + b"0000000\0" * 2
_TIME = b"00000000000\0"
_MAGIC = bytes(100) + b"ustar\0" + b"00" + bytes(247)
_SUM_OF_THE_REST = sum(_OWNER + _TIME + b" " * 8 + _MAGIC)


def padded(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def needs_pax(name: bytes, size: int) -> bool:
    return len(name) > 100 or size >= _LARGEST_OCTAL or not name.isascii()


def member_bytes(name: bytes, size: int) -> int:
    """What a file takes in a tar, its header included."""
    header = len(tar_header(name, size)) if needs_pax(name, size) else BLOCK_BYTES
    return header + padded(size)


def tar_header(name: bytes, size: int) -> bytes:
    """Header blocks of one regular file: owner 0, mode 0644, time 0, so nothing but name and size is in them.

    A name that is long or not ASCII, or a size beyond 8 GiB is told by a pax record in front (POSIX.1-2001).
    """
    if not needs_pax(name, size):
        return _ustar(name, size, b"0")
    records = b""
    try:
        name.decode("utf-8")
    except UnicodeDecodeError:
        records += _pax_record(b"hdrcharset", b"BINARY")
    records += _pax_record(b"path", name)
    if size >= _LARGEST_OCTAL:
        records += _pax_record(b"size", b"%d" % size)
    stand_in = bytes(byte if byte < 128 else 0x5F for byte in name[:100]).rstrip(b"/")
    pax = _ustar(b"././@PaxHeader", len(records), b"x") + records.ljust(padded(len(records)), b"\0")
    return pax + _ustar(stand_in, size if size < _LARGEST_OCTAL else 0, b"0")


def _pax_record(keyword: bytes, value: bytes) -> bytes:
    """``"<length> <keyword>=<value>\\n"``, where the length counts its own digits."""
    body = b" " + keyword + b"=" + value + b"\n"
    length = len(body) + len(str(len(body)))
    if len(str(length)) + len(body) != length:
        length += 1
    return b"%d" % length + body


def _ustar(name: bytes, size: int, kind: bytes) -> bytes:
    """One block; its checksum is the sum of its bytes, with blanks where it stands itself."""
    octal = b"%011o\0" % size
    total = sum(name) + sum(octal) + kind[0] + _SUM_OF_THE_REST
    return b"".join((name.ljust(100, b"\0"), _OWNER, octal, _TIME, b"%06o\0 " % total, kind, _MAGIC))
