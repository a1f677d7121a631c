from tests.servers import *  # noqa
