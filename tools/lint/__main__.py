"""Are documents, words and templates as they should be? Prints what is not, in seconds: python -m tools.lint"""

import sys

from comfyui_specar.tools.lint import documents, templates, words


def main() -> None:
    problems = [problem for module in (documents, words, templates) for check in module.CHECKS for problem in check()]
    print("\n".join(problems) or "Documents, words and templates are as they should be.")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
