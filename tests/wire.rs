//! Goal: `src/wire` is what `proto/` says. Method: generate again in memory and compare byte for byte.
//!
//! `RINGCAS_REGENERATE=1 cargo test --test wire` writes the files instead.

use std::collections::BTreeMap;
use std::path::Path;

use prost::Message;
use prost_build::{Config, Module};

/// Every file of `proto/`, as clients name them.
const FILES: [&str; 7] = [
    "build/bazel/remote/execution/v2/remote_execution.proto",
    "build/bazel/semver/semver.proto",
    "google/bytestream/bytestream.proto",
    "google/rpc/status.proto",
    "grpc/health/v1/health.proto",
    "grpc/reflection/v1/reflection.proto",
    "grpc/reflection/v1alpha/reflection.proto",
];

/// File name under `src/wire` to content.
fn generate() -> BTreeMap<String, Vec<u8>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut compiler = protox::Compiler::new([root.join("proto")]).expect("proto/ is there");
    compiler.include_imports(true).include_source_info(true);
    compiler.open_files(FILES).expect("the files are valid");
    let mut set = compiler.file_descriptor_set();

    let mut config = Config::new();
    config.bytes(["."]).compile_well_known_types().btree_map(["."]);
    let requests = set.file.iter().map(|file| (Module::from_protobuf_package_name(file.package()), file.clone()));
    let mut files = BTreeMap::new();
    for (module, code) in config.generate(requests.collect()).expect("the files can be generated") {
        let name = module.to_file_name_or("unnamed");
        files.insert(name, format!("// @generated from proto/ by tests/wire.rs\n{code}").into_bytes());
    }
    // Why: comments are for the generated code; reflection does without them.
    set.file.iter_mut().for_each(|file| file.source_code_info = None);
    set.file.sort_by(|a, b| a.name.cmp(&b.name));
    files.insert("descriptors.bin".to_owned(), set.encode_to_vec());
    files
}

#[test]
fn generated_code_is_current() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/wire");
    let files = generate();
    for (name, content) in &files {
        let path = directory.join(name);
        if std::env::var_os("RINGCAS_REGENERATE").is_some() {
            std::fs::write(&path, content).expect("src/wire can be written");
        }
        let committed = std::fs::read(&path).unwrap_or_default();
        assert!(&committed == content, "src/wire/{name} is stale: RINGCAS_REGENERATE=1 cargo test --test wire");
    }
    for entry in std::fs::read_dir(&directory).expect("src/wire is there") {
        let name = entry.expect("an entry of src/wire").file_name().to_string_lossy().into_owned();
        assert!(name == "mod.rs" || files.contains_key(&name), "src/wire/{name} is not made from proto/: remove it");
    }
}

#[test]
fn every_proto_file_is_compiled() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("proto");
    let (mut found, mut todo) = (Vec::new(), vec![root.clone()]);
    while let Some(directory) = todo.pop() {
        for entry in std::fs::read_dir(directory).expect("a directory of proto/") {
            let path = entry.expect("an entry of proto/").path();
            if path.is_dir() {
                todo.push(path);
            } else if path.extension().is_some_and(|e| e == "proto") {
                found.push(path.strip_prefix(&root).expect("under proto/").to_string_lossy().into_owned());
            }
        }
    }
    found.sort();
    assert_eq!(found, FILES);
}
