//! Copy-on-write children as seen by containers.

use std::fs;
use std::path::{Path, PathBuf};

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
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

/// Returns commands that change a tree at random. All files have the same size and time, so that
/// only their contents distinguish them.
fn changes(random: &mut SmallRng, commands: usize) -> String {
    let mut script = String::from("cd /child\n");
    for number in 0..commands {
        let mut path = || {
            let names: Vec<_> =
                (0..random.random_range(1..4)).map(|_| ["a", "b", "c"][random.random_range(0..3)]).collect();
            names.join("/")
        };
        let (one, other) = (path(), path());
        let file = format!("printf %04d {number} > {one}");
        let command = match random.random_range(0..12) {
            0 | 1 => format!("[ -d {one} ] || {file}"),
            2 => format!("rm -f {one}; [ -e {one} ] || {file}"),
            3 => format!("mkdir -p {one}"),
            4 => format!("rm -rf {one}; mkdir -p {one}; printf %04d {number} > {one}/a"),
            5 => format!("rm -rf {one}"),
            6 => format!("chmod 700 {one}"),
            7 => format!("ln {one} {other}"),
            8 => format!("ln -sfn x {one}"),
            9 => format!("mv -T {one} {other}"),
            _ => format!("mv -T {one} t && mv -T {other} {one} && mv -T t {other}"),
        };
        script.push_str(&format!("{{ {command}; }} 2>/dev/null\n"));
    }
    script + "find . -newermt @7 -exec touch -h -d @7 {} +"
}

fn set_time(path: &Path) {
    let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(7);
    fs::File::open(path).expect("opened").set_modified(time).expect("a time");
}

fn scan(root: &Path, layer: Option<transfer::Layer<'_>>) -> transfer::Scan {
    let options = transfer::ScanOptions { layer, ..transfer::ScanOptions::default() };
    let scan = transfer::scan(root, &options, None).expect("scanned");
    assert!(scan.problems.is_empty(), "{:?}", scan.problems);
    scan
}

#[tokio::test]
async fn scan_of_layer_finds_all_changes() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let seed = testing::seeds::seed();
    eprintln!("GANTRY_SEED={seed}");
    let mut random = SmallRng::seed_from_u64(seed);
    let mut known = 0;
    for _ in 0..8 {
        let mut volume = runtime.volume().await;
        let contents = directory(&*runtime, volume).await;
        let directories = ["a/a", "a/b", "b/a", "b/b/c", "b/b", "c", "a", "b", ""];
        directories.iter().for_each(|path| fs::create_dir_all(contents.join(path)).expect("directories"));
        for (number, path) in directories.iter().enumerate() {
            for name in ["x", "y"].map(|name| contents.join(path).join(name)) {
                fs::write(&name, format!("{number:04}")).expect("write");
                set_time(&name);
            }
            set_time(&contents.join(path));
        }
        let mut below = scan(&contents, None).manifest;
        // A child, a grandchild, and one more.
        for commands in [3, 8, 20] {
            let child = runtime.child(volume).await;
            let spec = ContainerSpec { mounts: vec![mount(child, "/child", false)], ..container() };
            let script = changes(&mut random, commands);
            runtime.run(spec, process(&["/bin/sh", "-c", &script].map(str::to_owned))).await;
            let layer = runtime.layer(child).await.expect("a volume").expect("an overlay");
            assert_eq!(layer.parent, volume);
            let root = directory(&*runtime, child).await;
            let whole = scan(&root, None).manifest;
            let layer = transfer::Layer {
                below: &below,
                upper: &layer.upper,
                user_attributes: layer.user_attributes,
            };
            let found = scan(&root, Some(layer));
            known += found.files_known;
            assert_eq!(found.manifest.entries(), whole.entries(), "after {script}");
            (volume, below) = (child, whole);
        }
    }
    assert!(known > 0, "nothing was known");
}
