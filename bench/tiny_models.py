from tests.tiny_models import *  # noqa
