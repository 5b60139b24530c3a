"""Goal: load balancers and grpcurl work.
Method: health calls by grpcio; reflection by grpcio-reflection's own client, which needs files and their imports."""

import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from google.protobuf.descriptor_pool import DescriptorPool

from reapi import HEALTH, REAPI, Code, fails, message

SERVICES = [
    f"{REAPI}.ActionCache",
    f"{REAPI}.Capabilities",
    f"{REAPI}.ContentAddressableStorage",
    "google.bytestream.ByteStream",
    "grpc.health.v1.Health",
]
SERVING, SERVICE_UNKNOWN = 1, 3


def request(service: str):
    return message("grpc.health.v1.HealthCheckRequest")(service=service)


@pytest.mark.parametrize("service", ["", *SERVICES])
def test_check(client, service):
    reply = client.unary(f"{HEALTH}/Check", request(service), "grpc.health.v1.HealthCheckResponse")
    assert reply.status == SERVING


def test_check_of_an_unknown_service(client):
    with fails(Code.NOT_FOUND):
        client.unary(f"{HEALTH}/Check", request("no.such.Service"), "grpc.health.v1.HealthCheckResponse")


def watch(client, service: str):
    encode = message("grpc.health.v1.HealthCheckRequest").SerializeToString
    decode = message("grpc.health.v1.HealthCheckResponse").FromString
    return client.channel.unary_stream(f"{HEALTH}/Watch", encode, decode)(request(service), timeout=20)


@pytest.mark.parametrize("service, status", [("", SERVING), (SERVICES[2], SERVING), ("no.such.Service", SERVICE_UNKNOWN)])
def test_watch_says_the_state_at_once_and_goes_on(client, service, status):
    stream = watch(client, service)
    assert next(stream).status == status
    assert stream.is_active()
    stream.cancel()


def test_reflection_lists_the_services(client):
    database = ProtoReflectionDescriptorDatabase(client.channel)
    found = set(database.get_services())
    assert found >= set(SERVICES), found


def test_reflection_gives_descriptors(client):
    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(client.channel))
    for name in SERVICES:
        service = pool.FindServiceByName(name)
        assert service.methods
        for method in service.methods:
            assert method.input_type.full_name and method.output_type.full_name
    fields = pool.FindMessageTypeByName(f"{REAPI}.ActionResult").fields_by_name
    assert fields["execution_metadata"].message_type.full_name == f"{REAPI}.ExecutedActionMetadata"


def reflect(client, version: str, *requests):
    package = f"grpc.reflection.{version}"
    encode = message(f"{package}.ServerReflectionRequest").SerializeToString
    decode = message(f"{package}.ServerReflectionResponse").FromString
    call = client.channel.stream_stream(f"/{package}.ServerReflection/ServerReflectionInfo", encode, decode)
    make = message(f"{package}.ServerReflectionRequest")
    return list(call(iter([make(**fields) for fields in requests]), timeout=20))


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_versions(client, version):
    listed, by_symbol, unknown, by_unknown_file = reflect(
        client,
        version,
        {"list_services": ""},
        {"file_containing_symbol": "google.bytestream.ByteStream.Read"},
        {"file_containing_symbol": "no.such.Symbol"},
        {"file_by_filename": "no/such/file.proto"},
    )
    assert len(listed.list_services_response.service) >= len(SERVICES)
    assert by_symbol.file_descriptor_response.file_descriptor_proto
    assert by_symbol.original_request.file_containing_symbol == "google.bytestream.ByteStream.Read"
    assert unknown.error_response.error_code == Code.NOT_FOUND.value[0]
    assert by_unknown_file.error_response.error_code == Code.NOT_FOUND.value[0]
