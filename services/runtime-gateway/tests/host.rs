//! The host runtime, on this machine.

mod host {
    pub(crate) mod subject;
}

use host::subject::HostSubject;

mod conformance {
    use super::HostSubject;

    testing::runtime_conformance!(HostSubject::new());
}
