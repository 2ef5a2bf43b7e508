"""Sphinx configuration: `make docs` builds the site into docs/_build/html without a network."""

import inspect
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

import torch_locoprop  # noqa: E402  (after the path)

project = "torch-locoprop"
author = "The torch-locoprop contributors"
copyright = author
version = release = torch_locoprop.__version__
REPOSITORY = "https://github.com/torch-locoprop/torch-locoprop"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "mathml",  # docs/_ext/mathml.py
    "repository_links",  # docs/_ext/repository_links.py
    "long_names",  # docs/_ext/long_names.py
]
exclude_patterns = ["_build", "gallery", "**/*.ipynb", "**/sg_execution_times.rst"]
default_role = "code"
nitpicky = True  # a reference to a public name of ours that does not exist is an error
PUBLIC = "|".join(torch_locoprop.__all__)
nitpick_ignore_regex = [("py:mod", ".*"), ("py:.*", rf"(?!torch_locoprop\.({PUBLIC})(\.\w+)?$).*")]

# ---- pages -------------------------------------------------------------------------------------

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"torch-locoprop {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [("search_from_files.js", {"priority": 300})]
html_math_renderer = "mathml"
html_theme_options = {
    "source_repository": REPOSITORY,
    "source_branch": "main",
    "source_directory": "docs/",
}
html_copy_source = False
html_show_sourcelink = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# ---- API reference -----------------------------------------------------------------------------

autodoc_member_order = "bysource"
# Defaults come from the table of settings: the source of the signature does not have them all.
autodoc_preserve_defaults = False
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False

# ---- gallery: every script is run, whenever the site is built ------------------------------------

sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "auto_gallery",
    "filename_pattern": r"\.py$",
    "within_subsection_order": "FileNameSortKey",
    "run_stale_examples": True,
    "abort_on_example_error": True,
    "show_memory": False,
    "write_computation_times": False,
    "download_all_examples": False,
    "remove_config_comments": True,
    "plot_gallery": "True",
}


def skip_members(
    app: Any, what: str, name: str, obj: object, skip: bool, options: object
) -> bool | None:
    """Leave out modules, which have pages of their own, and methods that a base class documents."""
    if inspect.ismodule(obj):
        return True
    function = obj.fget if isinstance(obj, property) else obj
    if not inspect.isfunction(function) or not function.__module__.startswith("torch_locoprop."):
        return None
    owner, _, method = function.__qualname__.rpartition(".")
    bases = getattr(getattr(sys.modules[function.__module__], owner, None), "__mro__", ())[1:]
    ours = [base for base in bases if base.__module__.startswith("torch_locoprop.")]
    return True if any(method in vars(base) for base in ours) else None


def literal_blocks(
    app: Any, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Show the indented parts of a module's docstring as code."""
    if what != "module":
        return
    indented = [line.startswith("    ") for line in lines]
    for index in reversed(range(1, len(lines))):
        if (
            indented[index]
            and not lines[index - 1]
            and not any(indented[max(index - 2, 0) : index])
        ):
            lines[index:index] = ["::", ""]


def resolve_at_the_top(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Link `torch_locoprop.variants.Variant`, say, to `torch_locoprop.Variant`, which is documented."""
    name = str(node.get("reftarget", "")).rpartition(".")[2]
    if node.get("refdomain") != "py" or name not in torch_locoprop.__all__:
        return None
    domain, target = env.get_domain("py"), f"torch_locoprop.{name}"
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", target, node, content)


def setup(app: Any) -> None:
    app.connect("missing-reference", resolve_at_the_top)
    app.connect("autodoc-skip-member", skip_members)
    app.connect("autodoc-process-docstring", literal_blocks)
