//! Tests of the Garden runtime with simulated and genuine servers of a Concourse worker.

mod containers;
mod ends;
mod faults;
mod genuine;
mod standby;
pub(crate) mod subject;
mod traps;
mod volumes;
mod worker_provided;

use subject::GardenSubject;
use testing::baggageclaim::Driver;
use testing::garden::Manner;

mod containerd {
    use super::*;

    testing::runtime_conformance!(GardenSubject::new(Manner::Containerd, Driver::Overlay).await);
}

mod guardian {
    use super::*;

    testing::runtime_conformance!(GardenSubject::new(Manner::Guardian, Driver::Naive).await);
}

mod houdini {
    use super::*;

    testing::runtime_conformance!(GardenSubject::new(Manner::Houdini, Driver::Naive).await);
}

mod real_server {
    use super::*;

    testing::runtime_conformance!(GardenSubject::genuine().await);
}
