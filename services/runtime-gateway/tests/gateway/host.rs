//! Tests of the host runtime on this machine.

mod children;
mod containment;
mod deep;
mod host_image;
mod images;
mod inside;
mod joined_networks;
mod leftovers;
mod networks;
mod ordinary_user;
mod slirp;
pub(crate) mod subject;
mod takeover;
mod user_namespaces;

use subject::HostSubject;

mod conformance {
    use super::HostSubject;

    testing::runtime_conformance!(HostSubject::new());
}
