//! Generates Rust code and the descriptors for reflection from `proto/`.

use std::path::{Path, PathBuf};

use prost::Message;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = Path::new("../../proto");
    let mut protos = Vec::new();
    collect(root, &mut protos)?;
    protos.sort();

    let descriptors = protox::compile(&protos, [root])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    // A page token has a digest of its request, so maps need an order.
    tonic_prost_build::configure().btree_map(".gantry.runtime.v1").bytes(".").compile_fds(descriptors)?;

    println!("cargo:rerun-if-changed=../../proto");
    Ok(())
}

fn collect(directory: &Path, protos: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, protos)?;
        } else if path.extension().is_some_and(|extension| extension == "proto") {
            protos.push(path);
        }
    }
    Ok(())
}
