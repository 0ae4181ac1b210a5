"""OmegaConf resolvers for the paths in our YAMLs, so that a config names no machine and no working folder.

``${loop_home:}`` is where worlds, environments and runs live: ``$LOOP_HOME``, else the checkout this package was
installed from in editable mode, else the current folder. ``${loop_package:tiny_policy}`` is a folder inside the
installed package. Importing this module registers both.
"""

from omegaconf import OmegaConf

from loop_formats.places import loop_home
from loop_recipes.paths import loop_package

OmegaConf.register_resolver("loop_home", lambda: str(loop_home()), replace=True)
OmegaConf.register_resolver("loop_package", lambda relative: str(loop_package(relative)), replace=True)
