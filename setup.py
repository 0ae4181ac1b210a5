"""Puts one file into site-packages itself, also by an editable install, of which a checkout holds all else.

pyproject.toml says the rest. torch looks for this file whenever it is imported, so the file must outlive the checkout.
"""

from setuptools import Distribution, setup

Distribution.has_data = Distribution.has_data_files  # the name by which an editable install asks for it
# A wheel's folder of what goes to site-packages, as seen from that of its data.
setup(data_files=[("../purelib", ["torchtune_loop_hook.py"])])
