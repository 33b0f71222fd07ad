//! Copy-on-write children as seen by containers.

use std::fs;
use std::path::PathBuf;

use runtime::ContainerSpec;
use testing::conformance::{RuntimeExt, Subject, container, directory, mount, process};

use super::subject::HostSubject;

#[tokio::test]
async fn hard_links_stay_linked_in_children() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let parent = runtime.volume().await;
    let contents = directory(&*runtime, parent).await;
    fs::create_dir_all(contents.join("d/e")).expect("directories");
    fs::write(contents.join("d/e/one"), "1").expect("write");
    fs::hard_link(contents.join("d/e/one"), contents.join("two")).expect("a link");
    let names = || ["d/e/one", "two"].map(PathBuf::from).to_vec();
    let mut below = parent;
    // A child and a grandchild.
    for expected in ["12", "122"] {
        let child = domain::VolumeHandle::new();
        let source = runtime::VolumeSource::CopyOnWriteLinked { parent: below, names: names() };
        runtime.create_volume(child, source).await.expect("a child");
        let spec = ContainerSpec { mounts: vec![mount(child, "/child", false)], ..container() };
        let script = "cd /child && printf 2 >> two && cat d/e/one && stat -c ' %h %i' two d/e/one";
        let output = runtime.run(spec, process(&["/bin/sh", "-c", script].map(str::to_owned))).await;
        let output = output.text();
        let mut lines = output.lines();
        assert_eq!(lines.next().map(|first| first.split(' ').next()), Some(Some(expected)), "{output}");
        let inodes: Vec<_> = output.lines().map(|line| line.rsplit(' ').next()).collect();
        assert_eq!(inodes[0], inodes[1], "{output}");
        below = child;
    }
    assert_eq!(fs::read_to_string(contents.join("two")).expect("read"), "1", "the parent is unchanged");
}
