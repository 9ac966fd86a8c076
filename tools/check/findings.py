"""What `tools.prove` imports from here; it leaves with it. The findings are those of `tools.submit.check`."""

from tools.submit.findings import Finding, Level, Mode, contested, fail, info, warn

__all__ = ["Finding", "Level", "Mode", "contested", "fail", "info", "warn"]
