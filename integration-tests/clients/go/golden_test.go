package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	_ "google.golang.org/genproto/googleapis/rpc/status"
)

func TestEachMessageIsWhatItsJSONSays(t *testing.T) {
	paths, err := filepath.Glob("../golden/*.binpb")
	if err != nil || len(paths) <= 25 {
		t.Fatalf("%d messages, %v", len(paths), err)
	}
	for _, path := range paths {
		stem := strings.TrimSuffix(path, ".binpb")
		t.Run(filepath.Base(stem), func(t *testing.T) {
			name := strings.TrimSuffix(filepath.Base(stem), filepath.Ext(stem))
			kind, err := protoregistry.GlobalTypes.FindMessageByName(protoreflect.FullName(name))
			if err != nil {
				t.Fatal(err)
			}
			encoded, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			text, err := os.ReadFile(stem + ".json")
			if err != nil {
				t.Fatal(err)
			}
			decoded, expected := kind.New().Interface(), kind.New().Interface()
			if err := proto.Unmarshal(encoded, decoded); err != nil {
				t.Fatal(err)
			}
			if err := protojson.Unmarshal(text, expected); err != nil {
				t.Fatal(err)
			}
			if !proto.Equal(decoded, expected) {
				t.Errorf("decoded %v, expected %v", decoded, expected)
			}
		})
	}
}
