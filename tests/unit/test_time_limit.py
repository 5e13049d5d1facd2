"""A test that hangs is named: by pytest-timeout or, where no signal is seen, by faulthandler."""

from ..support.patience import PATIENCE


def test_limits(pytestconfig):
    """The longest wait of a test ends before its limit does, and what needs no lock comes last."""
    limits = float(pytestconfig.getini("timeout")), float(pytestconfig.getini("faulthandler_timeout"))
    assert PATIENCE < limits[0] < limits[1]
    assert pytestconfig.getini("faulthandler_exit_on_timeout") is True
