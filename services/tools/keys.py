"""Creates keys and certificates for `tether keys`: `python -m services.tools.keys DIR [NAME ...]`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from protocol.errors import SettingsError


def make_keys(directory: Path, endpoint: Sequence[str]) -> str:
    """Create the CURVE keys of the bus, or a certificate for the harness endpoint; return the next steps.

    Args:
        directory: directory of the keys; must not contain such keys.
        endpoint: names and addresses by which harnesses reach the endpoint; empty: keys of the bus.

    Raises:
        SettingsError: the directory contains such keys.
    """
    if endpoint:
        from protocol.network.certificates import create_certificate

        cert_file, key_file = create_certificate(directory, endpoint)
        return (
            f"set environment.cert_file to {cert_file} and environment.key_file to {key_file}; clients have "
            f"to trust {cert_file}, such as by SSL_CERT_FILE"
        )
    from services.bus.curve import create_keys

    create_keys(directory)
    return f"keys are in {directory}; set bus.curve_dir to it on every host"


def main() -> None:
    """Create the bus keys in DIR, or a certificate for names."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m services.tools.keys DIR [NAME ...]")
    try:
        print(make_keys(Path(sys.argv[1]), sys.argv[2:]))
    except (SettingsError, OSError) as error:
        print(f"tether keys: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
