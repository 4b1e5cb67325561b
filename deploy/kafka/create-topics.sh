#!/bin/sh
# Creates the topics that are missing, with the names and bounds the consumer is given; changes none that exist.
set -eu
kafka_topics=${KAFKA_TOPICS_COMMAND:-/opt/kafka/bin/kafka-topics.sh}
create() {
  "$kafka_topics" --bootstrap-server "$TWODOOR_KAFKA_BOOTSTRAP_SERVERS" --create --if-not-exists --topic "$1" \
    --partitions "$2" --replication-factor "$REPLICATION_FACTOR" --config "max.message.bytes=$3"
}
create "$TWODOOR_KAFKA_REQUESTS_TOPIC" "$TWODOOR_KAFKA_PARTITIONS" "$TWODOOR_KAFKA_MAX_MESSAGE_BYTES"
create "$TWODOOR_KAFKA_RESULTS_TOPIC" "$TWODOOR_KAFKA_PARTITIONS" "$TWODOOR_KAFKA_MAX_MESSAGE_BYTES"
create "$TWODOOR_KAFKA_JOBS_TOPIC" "$TWODOOR_KAFKA_PARTITIONS" "$TWODOOR_KAFKA_MAX_MESSAGE_BYTES"
create "$TWODOOR_KAFKA_JOBS_EVENTS_TOPIC" "$TWODOOR_KAFKA_PARTITIONS" "$TWODOOR_KAFKA_MAX_MESSAGE_BYTES"
# A dead letter is the record as it came and five headers more.
create "$TWODOOR_KAFKA_DLQ_TOPIC" 1 "$((TWODOOR_KAFKA_MAX_MESSAGE_BYTES + 65536))"
create "$TWODOOR_KAFKA_JOBS_DLQ_TOPIC" 1 "$((TWODOOR_KAFKA_MAX_MESSAGE_BYTES + 65536))"
