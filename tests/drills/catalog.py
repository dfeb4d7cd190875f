"""All drills, in the order in which they run and the page lists them."""

from tests.drills import (
    flipped_bits,
    hostile,
    interrupts,
    kills,
    poison,
    replicas,
    schemas,
    server_faults,
    suites,
)

DRILLS = (
    *server_faults.TIMED,
    *poison.DRILLS,
    *interrupts.DRILLS,
    *flipped_bits.DRILLS,
    *hostile.DRILLS,
    *schemas.DRILLS,
    *server_faults.OTHERS,
    *kills.DRILLS,  # late: they have what others leave of their time
    *replicas.DRILLS,
    server_faults.SOAK,
)
SUITES = suites.DRILLS
