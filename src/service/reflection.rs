//! `grpc.reflection.v1.ServerReflection` and `v1alpha`, which are the same on the wire.
//!
//! The descriptors are compiled in (`wire::DESCRIPTORS`) and read in place at each request: 20 KB, asked for by people.

use std::collections::HashSet;

use bytes::Bytes;

use super::{Code, Reply, Status, decode, reply};
use crate::pure::protobuf::{Field, Fields};
use crate::wire::DESCRIPTORS;
use crate::wire::reflection::server_reflection_request::MessageRequest;
use crate::wire::reflection::server_reflection_response::MessageResponse;
use crate::wire::reflection::{
    ErrorResponse, ExtensionNumberResponse, FileDescriptorResponse, ListServiceResponse, ServerReflectionRequest,
    ServerReflectionResponse, ServiceResponse,
};

/// One response for each request of the bidirectional stream `ServerReflectionInfo`, in order. State-free.
pub fn answer(request: &[u8]) -> Result<Reply, Status> {
    let request: ServerReflectionRequest = decode(request)?;
    let response = match &request.message_request {
        Some(MessageRequest::ListServices(_)) => list_services(),
        Some(MessageRequest::FileByFilename(name)) => {
            with_imports(files().find(|file| file.name() == name), || format!("no file {name:?}"))
        }
        Some(MessageRequest::FileContainingSymbol(symbol)) => {
            with_imports(files().find(|file| file.declares(symbol)), || format!("no symbol {symbol:?}"))
        }
        Some(MessageRequest::AllExtensionNumbersOfType(name)) if files().any(|file| file.declares(name)) => {
            let response = ExtensionNumberResponse { base_type_name: name.clone(), extension_number: Vec::new() };
            MessageResponse::AllExtensionNumbersResponse(response)
        }
        Some(MessageRequest::AllExtensionNumbersOfType(name)) => error(Code::NotFound, format!("no type {name:?}")),
        Some(MessageRequest::FileContainingExtension(_)) => error(Code::NotFound, "there are no extensions here"),
        None => error(Code::InvalidArgument, "message_request: must be set"),
    };
    Ok(reply::encode(&ServerReflectionResponse {
        valid_host: request.host.clone(),
        original_request: Some(request),
        message_response: Some(response),
    }))
}

fn error(code: Code, message: impl Into<String>) -> MessageResponse {
    MessageResponse::ErrorResponse(ErrorResponse { error_code: code as i32, error_message: message.into() })
}

fn list_services() -> MessageResponse {
    let mut service: Vec<_> = files()
        .flat_map(|file| file.services().map(move |name| ServiceResponse { name: file.full_name(name) }))
        .collect();
    service.sort_by(|a, b| a.name.cmp(&b.name));
    MessageResponse::ListServicesResponse(ListServiceResponse { service })
}

/// The file and everything that it imports, each once, the file itself first.
fn with_imports(file: Option<File>, missing: impl Fn() -> String) -> MessageResponse {
    let Some(file) = file else { return error(Code::NotFound, missing()) };
    let (mut seen, mut order) = (HashSet::from([file.name()]), vec![file]);
    let mut at = 0;
    while let Some(file) = order.get(at).copied() {
        at += 1;
        for import in file.imports() {
            if seen.insert(import) {
                order.extend(files().find(|file| file.name() == import));
            }
        }
    }
    let file_descriptor_proto = order.into_iter().map(|file| Bytes::from_static(file.0)).collect();
    MessageResponse::FileDescriptorResponse(FileDescriptorResponse { file_descriptor_proto })
}

/// A serialized `google.protobuf.FileDescriptorProto`: name = 1, package = 2, dependency = 3, message_type = 4,
/// enum_type = 5, service = 6.
#[derive(Clone, Copy)]
struct File(&'static [u8]);

/// The files of the FileDescriptorSet (file = 1).
fn files() -> impl Iterator<Item = File> {
    children(DESCRIPTORS, 1).map(File)
}

impl File {
    fn name(self) -> &'static str {
        text(self.0, 1)
    }

    fn imports(self) -> impl Iterator<Item = &'static str> {
        children(self.0, 3).map(utf8)
    }

    fn services(self) -> impl Iterator<Item = &'static str> {
        children(self.0, 6).map(name)
    }

    fn full_name(self, name: &str) -> String {
        match text(self.0, 2) {
            "" => name.to_owned(),
            package => format!("{package}.{name}"),
        }
    }

    /// Whether `symbol` is the full name of something in this file.
    fn declares(self, symbol: &str) -> bool {
        let local = match text(self.0, 2) {
            "" => Some(symbol),
            package => symbol.strip_prefix(package).and_then(|rest| rest.strip_prefix('.')),
        };
        let Some(local) = local else { return false };
        let service = |local: &str| match local.split_once('.') {
            None => children(self.0, 6).any(|service| name(service) == local),
            Some((outer, method)) => children(self.0, 6)
                .any(|service| name(service) == outer && children(service, 2).any(|found| name(found) == method)),
        };
        service(local) || children(self.0, 4).any(|message| message_declares(message, local)) || {
            children(self.0, 5).any(|found| enum_declares(found, local))
        }
    }
}

/// Whether a DescriptorProto (name = 1, field = 2, nested_type = 3, enum_type = 4, oneof_decl = 8) is or holds `path`.
fn message_declares(mut message: &'static [u8], mut path: &str) -> bool {
    loop {
        let Some(rest) = path.strip_prefix(name(message)) else { return false };
        if rest.is_empty() {
            return true;
        }
        let Some(rest) = rest.strip_prefix('.') else { return false };
        let is_member = [2, 8].iter().any(|&kind| children(message, kind).any(|found| name(found) == rest));
        if is_member || children(message, 4).any(|found| enum_declares(found, rest)) {
            return true;
        }
        let first = rest.split('.').next().unwrap_or(rest);
        let Some(nested) = children(message, 3).find(|&nested| name(nested) == first) else { return false };
        (message, path) = (nested, rest);
    }
}

/// Whether an EnumDescriptorProto (name = 1, value = 2) is `path`, or has a value of that name, which protobuf scopes
/// beside the enum and not in it.
fn enum_declares(found: &'static [u8], path: &str) -> bool {
    name(found) == path || children(found, 2).any(|value| name(value) == path)
}

/// The sub-messages or strings in one field of a descriptor.
fn children(message: &'static [u8], number: u32) -> impl Iterator<Item = &'static [u8]> {
    let field = move |field: Field<'static>| (field.number == number).then(|| field.bytes().ok()).flatten();
    Fields::of(message).filter_map(Result::ok).filter_map(field)
}

/// A descriptor's `name` = 1.
fn name(message: &'static [u8]) -> &'static str {
    text(message, 1)
}

fn text(message: &'static [u8], number: u32) -> &'static str {
    children(message, number).next().map(utf8).unwrap_or_default()
}

fn utf8(bytes: &'static [u8]) -> &'static str {
    std::str::from_utf8(bytes).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;
    use crate::service::SERVICES;
    use crate::wire::reflection::ExtensionRequest;

    const REAPI: &str = "build/bazel/remote/execution/v2/remote_execution.proto";

    fn ask(request: MessageRequest) -> MessageResponse {
        let request = ServerReflectionRequest { host: "here".into(), message_request: Some(request) };
        let reply = answer(&request.encode_to_vec()).expect("a valid request");
        let response = ServerReflectionResponse::decode(&reply.concat()[..]).expect("a message");
        assert_eq!((response.valid_host.as_str(), response.original_request), ("here", Some(request)));
        response.message_response.expect("set")
    }

    /// The names of the files in a response; an error's code instead.
    fn names(response: MessageResponse) -> Result<Vec<String>, i32> {
        match response {
            MessageResponse::FileDescriptorResponse(files) => {
                let first_field = |file: &Bytes| {
                    let field = Fields::of(file).next().expect("a field").expect("valid");
                    String::from_utf8(field.bytes().expect("a string").to_vec()).expect("UTF-8")
                };
                Ok(files.file_descriptor_proto.iter().map(first_field).collect())
            }
            MessageResponse::ErrorResponse(error) => Err(error.error_code),
            other => panic!("{other:?}"),
        }
    }

    fn of_symbol(symbol: &str) -> Result<Vec<String>, i32> {
        names(ask(MessageRequest::FileContainingSymbol(symbol.into())))
    }

    /// Goal: reflection, health and the router speak of the same services. Method: compare with the one list.
    #[test]
    fn lists_exactly_what_is_served() {
        let MessageResponse::ListServicesResponse(list) = ask(MessageRequest::ListServices("*".into())) else {
            panic!("not a list")
        };
        let names: Vec<_> = list.service.into_iter().map(|service| service.name).collect();
        assert_eq!(names, SERVICES);
    }

    /// Goal: every kind of symbol is found, and near misses are not. Method: one example for each.
    #[test]
    fn finds_symbols_of_every_kind() {
        let package = "build.bazel.remote.execution.v2";
        let known = [
            "ContentAddressableStorage",
            "ContentAddressableStorage.FindMissingBlobs",
            "Digest",
            "Digest.size_bytes",
            "BatchUpdateBlobsRequest.Request",
            "BatchUpdateBlobsRequest.Request.data",
            "DigestFunction.Value",
            "DigestFunction.SHA256",
        ];
        for symbol in known {
            let files = of_symbol(&format!("{package}.{symbol}")).expect(symbol);
            assert_eq!(files[0], REAPI, "{symbol}");
        }
        assert!(of_symbol("grpc.reflection.v1.ServerReflectionRequest.message_request").is_ok());
        let unknown = [
            "Dig",
            "Digests",
            "Digest.",
            "Digest.size",
            "ContentAddressableStorage.",
            "",
            "Digest.hash.x",
            "Execution",
        ];
        for symbol in unknown {
            assert_eq!(of_symbol(&format!("{package}.{symbol}")), Err(5), "{symbol}");
        }
        assert_eq!(of_symbol(""), Err(5));
        assert_eq!(of_symbol(package), Err(5));
    }

    /// Goal: a client can build the file without asking again. Method: the imports of the imports are there, once each.
    #[test]
    fn files_come_with_their_imports() {
        let files = names(ask(MessageRequest::FileByFilename(REAPI.into()))).expect("known");
        assert_eq!(
            files,
            [
                REAPI,
                "build/bazel/semver/semver.proto",
                "google/protobuf/any.proto",
                "google/protobuf/duration.proto",
                "google/protobuf/timestamp.proto",
                "google/protobuf/wrappers.proto",
                "google/rpc/status.proto",
            ]
        );
        assert_eq!(names(ask(MessageRequest::FileByFilename("none.proto".into()))), Err(5));
    }

    /// Goal: extensions, of which there are none, and empty requests have their answers.
    #[test]
    fn answers_the_rest() {
        assert_eq!(names(ask(MessageRequest::FileContainingExtension(ExtensionRequest::default()))), Err(5));
        let known = ask(MessageRequest::AllExtensionNumbersOfType("google.rpc.Status".into()));
        assert!(matches!(known, MessageResponse::AllExtensionNumbersResponse(r) if r.extension_number.is_empty()));
        assert_eq!(names(ask(MessageRequest::AllExtensionNumbersOfType("google.rpc.None".into()))), Err(5));
        let reply = answer(&[]).expect("valid").concat();
        let response = ServerReflectionResponse::decode(&reply[..]).expect("a message");
        assert_eq!(names(response.message_response.expect("set")), Err(3));
        assert!(answer(&[0xff]).is_err());
    }
}
